"""A model as a chain of layers with what each computes, keeps and hands on: from a module, or straight from numbers."""
