"""The step under test on one rank: the model, its sharding, its training, its measurements.

``rank.main`` runs a trial, ``warm.warm`` imports in advance what it will need. Importing this
package imports nothing else.
"""

__all__ = ["rank", "warm"]
