"""The help of the recipe names every key that a recipe can have, those of tables inside sections too."""

import tomllib
from collections.abc import Iterator
from typing import Any

from shoal.trainer.config import Recipe, describe_recipe


def uncommented(line: str) -> str:
    """The line without the mark of one that only shows a key."""
    return line.removeprefix("# ")


def lines_of(title: str) -> list[str]:
    """The lines of one table."""
    lines = describe_recipe().splitlines()
    begin = next(place for place, line in enumerate(lines) if uncommented(line).split("  #")[0] == f"[{title}]")
    rest = [uncommented(line) for line in lines[begin + 1 :]]
    return rest[: rest.index("")] if "" in rest else rest


def keys_in(schema: Any) -> Iterator[str]:
    """Every key that the schema of the recipe declares with a plain value."""
    for model in (schema, *schema["$defs"].values()):
        for key, field in model.get("properties", {}).items():
            inner = (
                field,
                field.get("additionalProperties") or {},
                field.get("items") or {},
                *field.get("anyOf", ()),
                *field.get("oneOf", ()),
            )
            if not any("$ref" in option for option in inner if isinstance(option, dict)):
                yield key


def test_tables_inside_a_section_have_their_keys_and_their_help():
    shape = lines_of("planner.shape")
    assert "hidden = (required)    # int: Width of the residual stream." in shape
    assert "tied = false    # bool: One matrix for the embedding and the output layer." in shape
    device = lines_of("planner.devices.NAME")
    assert any(line.startswith("memory_gib = (required)    # float: ") for line in device)
    assert any(line.startswith("peak_tflops = (required)    # table of float: ") for line in device)
    assert not any(line.startswith(("shape =", "devices =")) for line in lines_of("planner"))


def test_no_key_of_the_recipe_is_left_out():
    shown = {uncommented(line).split(" = ")[0] for line in describe_recipe().splitlines() if " = " in line}
    assert set(keys_in(Recipe.model_json_schema())) - shown == set()


def test_the_help_is_a_file_that_sets_every_default():
    found = tomllib.loads(describe_recipe())
    assert found["model"]["name"] == "gpt" and found["data"]["source"] == "stdlib", "the first choice of a section"
    recipe = Recipe.model_validate({**found, "train": {**found["train"], "steps": 1}})
    bare = Recipe.model_validate({"model": {"name": "gpt"}, "data": {"source": "stdlib"}, "train": {"steps": 1}})
    assert recipe == bare
    assert "shape" not in found["planner"] and "devices" not in found["planner"]
