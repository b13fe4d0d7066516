from headrace.scoring.advantages import compared, is_masked

__all__ = ["compared", "is_masked"]
