"""Schedules of all ranks side by side: who met whom, where they part, what does not complete."""
