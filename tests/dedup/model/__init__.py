"""One model of dedup against all its implementations: ``python -m tests.dedup.model --examples 20000``."""
