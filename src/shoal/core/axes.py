"""The axes of a mesh, outermost first. *Axis* is for meshes, *dim* is for tensors."""

from enum import StrEnum


class Axis(StrEnum):
    """One way of dividing ranks. The order is the order of ranks: ``islands`` varies slowest, ``tp`` fastest."""

    ISLAND = "islands"
    PIPELINE = "pp"
    DATA = "dp"
    CONTEXT = "cp"
    TENSOR = "tp"
    EXPERT = "ep"
