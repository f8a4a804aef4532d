"""A watched job on several nodes: each has a watcher of its own, and they tell each other.

``pulse``: what a watcher says of its ranks; ``mailbox``: the folder that they share; ``exchange``:
the thread that writes and reads it; ``peers``: what the others' words mean, pure; ``together``:
what a supervisor asks of all this.
"""
