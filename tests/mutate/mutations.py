"""What ``make mutate`` breaks: for every promise of ``docs/guarantees.md`` a line of the source, and the test that has to see it.

A mutation is a mistake that somebody could make: a sum left out, an order turned round, a check that is skipped. ``old`` occurs
exactly once in its file; ``tests/architecture/test_mutations.py`` checks that in every run of the tests, and that no row of the
guarantees is without a mutation or a reason.
"""

from cache_mutations import CACHES
from checkpoint_mutations import CHECKPOINTS
from dashboard_mutations import DASHBOARD
from ending_mutations import ENDINGS
from failure_mutations import FAILURE
from library_mutations import LIBRARY
from numerics_mutations import NUMERICS
from online_mutations import ONLINE
from promises import Mutation
from receipt_mutations import RECEIPTS
from store_mutations import STORES
from table_mutations import TABLES
from trust_mutations import TRUST

MUTATIONS: list[Mutation] = [
    *NUMERICS,
    *ENDINGS,
    *FAILURE,
    *CHECKPOINTS,
    *CACHES,
    *STORES,
    *RECEIPTS,
    *TABLES,
    *ONLINE,
    *DASHBOARD,
    *LIBRARY,
    *TRUST,
]
WITHOUT: dict[str, str] = {}
"""Promises without a mutation, each with the reason."""
