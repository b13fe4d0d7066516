from headrace.scoring.advantages import advantages as advantages_of

__all__ = ["advantages_of"]
