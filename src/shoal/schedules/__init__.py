"""Pipeline schedules as data: generated, checked, priced and drawn without torch, and executed by ``pipeline/``."""
