"""A model as a list of layers and their costs: what each computes, saves and hands on; traced from a module, or from numbers."""
