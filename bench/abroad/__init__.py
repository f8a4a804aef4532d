"""``make abroad``: `moediag watch` on programs that others wrote, healthy and with one fault each.

``table.py`` has the cases with their truth, ``programs.py`` how each program is started on CPU
ranks. A checkout is copied for each run and edited there, so nothing of it is in this repository.
"""
