"""What every process of a run will hold in memory, worked out before anything starts. Pure, without torch.

configuration ─┐
model shapes ──┼─▶ needs of each process ─▶ what is left open is chosen ─▶ a plan, or a refusal with a remedy
machine ───────┘   (trainer, engine, rest)   (choose)                       (table)
"""

from headrace.memory_plan.choose import Plan, make_plan
from headrace.memory_plan.needs import Machine, Models, Need

__all__ = ["Machine", "Models", "Need", "Plan", "make_plan"]
