"""What a dead save leaves is told from what was set aside on purpose."""

from shoal.checkpoint.layout import Beside, beside_name, draw_id, step_name
from shoal.checkpoint.sweep import is_leftover, sweep


def test_what_was_set_aside_on_purpose_is_nobodys_leftover(tmp_path):
    """`shoal doctor` called it left by a save that never ended, and would have removed it."""
    names = {kind: beside_name(kind, 4, draw_id()) for kind in Beside}
    for name in names.values():
        (tmp_path / name).mkdir()
    (tmp_path / step_name(4)).mkdir()
    assert {kind for kind, name in names.items() if is_leftover(name)} == set(Beside) - {Beside.ASIDE}
    assert not is_leftover(step_name(4)) and not is_leftover("notes.txt")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[Beside.ASIDE], step_name(4)])
