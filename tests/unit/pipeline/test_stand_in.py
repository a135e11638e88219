"""What stands in the place of a unit of another rank."""

from torch import nn

from shoal.pipeline.stand_in import Absent


def test_who_restores_modes_one_by_one_restores_the_unit_behind_too():
    """An evaluation does: a unit left in evaluation would be asked for other shapes and count no dropout."""
    unit = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model = nn.ModuleList([Absent(unit)])
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    assert not unit.training and not unit[1].training
    for module, was_training in modes:
        module.training = was_training
    assert unit.training and unit[1].training
