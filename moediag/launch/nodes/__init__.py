"""A watched job on several nodes: each node has its own watcher, and watchers tell each other."""

__all__ = ["other_nodes", "rendezvous"]
