"""The step under test on one rank: the model, its sharding, its training, what is measured of it.

``rank.main`` runs a trial, ``warm.warm`` imports beforehand what it will need. Importing this
package imports nothing else.
"""

__all__ = ["rank", "warm"]
