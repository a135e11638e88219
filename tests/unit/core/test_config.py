"""Recipes are refused by name: the key, what was found, and the nearest right one."""

from typing import Literal

import pytest
from pydantic import Field

from shoal.core.config import Config, apply_overrides, read_toml, tagged, validate
from shoal.core.errors import RequestError


class Cat(Config):
    kind: Literal["cat"] = "cat"
    """What it is."""
    lives: int = 9
    """How many."""


class Dog(Config):
    kind: Literal["dog"] = "dog"
    """What it is."""
    tricks: int = 0
    """How many."""


class Own(Config):
    build: str
    """Where it comes from."""


class Home(Config):
    size: int = 1
    """Rooms."""


class Garden(Config):
    trees: int = 0
    """How many."""
    flowers: int = 0
    """How many."""


class Zoo(Config):
    pet: tagged(Cat, Dog, Own, key="kind")
    """The pet."""
    home: Home = Home()
    """Where it lives."""
    garden: Garden | None = None
    """Where it plays."""
    others: dict[str, Garden] = Field(default_factory=dict)
    """Of the neighbours, by name."""
    ages: dict[str, int] = Field(default_factory=dict)
    """Of the keepers, by name."""


def refused(tables):
    with pytest.raises(RequestError) as refusal:
        validate(Zoo, tables, origin="zoo.toml")
    return str(refusal.value)


def test_a_misspelt_key_gets_the_nearest_name():
    assert refused({"pet": {"kind": "cat", "livez": 3}}) == "zoo.toml: unknown key 'pet.livez'; did you mean 'lives'?"
    assert refused({"pet": {"kind": "cat"}, "hone": {}}) == "zoo.toml: unknown key 'hone'; did you mean 'home'?"
    assert "did you mean 'size'?" in refused({"pet": {"kind": "cat"}, "home": {"sise": 3}})


def test_a_misspelt_key_of_a_table_inside_a_table_gets_the_nearest_name():
    pet = {"kind": "cat"}
    said = refused({"pet": pet, "garden": {"flovers": 3}})
    assert said == "zoo.toml: unknown key 'garden.flovers'; did you mean 'flowers'?"
    said = refused({"pet": pet, "others": {"smith": {"tree": 3}}})
    assert said == "zoo.toml: unknown key 'others.smith.tree'; did you mean 'trees'?"
    assert "zoo.toml: garden.trees: " in refused({"pet": pet, "garden": {"trees": "many"}})
    assert "zoo.toml: others.smith: " in refused({"pet": pet, "others": {"smith": 3}})
    assert "zoo.toml: ages.ann: " in refused({"pet": pet, "ages": {"ann": "old"}})


def test_a_key_of_another_choice_is_unknown_here():
    assert "unknown key 'pet.tricks'" in refused({"pet": {"kind": "cat", "tricks": 1}})


def test_an_unknown_choice_gets_the_nearest_one():
    assert refused({"pet": {"kind": "cas"}}) == "zoo.toml: pet.kind: there is no 'cas'; did you mean 'cat'?"


def test_build_selects_the_own_section():
    assert validate(Zoo, {"pet": {"build": "a:b"}}, origin="x").pet == Own(build="a:b")


def test_wrong_types_say_what_was_found():
    assert "home.size" in refused({"pet": {"kind": "dog"}, "home": {"size": "big"}})
    assert "'big'" in refused({"pet": {"kind": "dog"}, "home": {"size": "big"}})


def test_all_problems_come_at_once():
    message = refused({"pet": {"kind": "cat", "livez": 3}, "home": {"sise": 3}})
    assert len(message.splitlines()) == 2


def test_field_docstrings_are_the_help():
    assert Home.model_fields["size"].description == "Rooms."


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 1e-3), ("true", True), ("[1, 2]", [1, 2]), ("adamw", "adamw"), ('"3"', "3"), ('""', "")],
)
def test_override_values_are_toml_or_a_bare_word(text, value):
    assert apply_overrides({}, [f"a.b={text}"]) == {"a": {"b": value}}


def test_overrides_do_not_change_what_they_were_given():
    tables = {"a": {"b": 1}}
    assert apply_overrides(tables, ["a.b=2", "a.c=3"]) == {"a": {"b": 2, "c": 3}}
    assert tables == {"a": {"b": 1}}


def test_an_override_without_a_value_takes_the_key_out():
    tables = {"a": {"b": 1, "c": 2}}
    assert apply_overrides(tables, ["a.b="]) == {"a": {"c": 2}}
    assert apply_overrides(tables, ["a.b=", "a.b=3"]) == {"a": {"b": 3, "c": 2}}
    with pytest.raises(RequestError, match=r"'a\.bb=' takes out a key that the recipe does not set; did you mean 'b'"):
        apply_overrides(tables, ["a.bb="])


def test_an_error_of_an_override_is_not_blamed_on_the_file():
    def refused_with(*overrides, **tables):
        with pytest.raises(RequestError) as refusal:
            validate(Zoo, {"pet": {"kind": "cat"}, **tables}, origin="zoo.toml", overrides=overrides)
        return str(refusal.value).splitlines()

    assert refused_with("home.sise=3") == ["--set home.sise=3: unknown key 'home.sise'; did you mean 'size'?"]
    assert refused_with("hone.size=3") == ["--set hone.size=3: unknown key 'hone'; did you mean 'home'?"]
    assert refused_with("pet.kind=cow")[0].startswith("--set pet.kind=cow: pet.kind: there is no 'cow'")
    assert refused_with("pet={kind = 'dog', trics = 1}")[0].startswith(
        "--set pet={kind = 'dog', trics = 1}: unknown key"
    )
    # What the file has wrong by itself is the file's, whatever else is set.
    own, others = sorted(refused_with("home.size=large", garden={"tres": 1}), reverse=True)
    assert own == "zoo.toml: unknown key 'garden.tres'; did you mean 'trees'?" and others.startswith(
        "--set home.size=large: "
    )
    assert validate(Zoo, {"pet": {"kind": "cat"}}, origin="x", overrides=["home.size=7"]).home.size == 7


@pytest.mark.parametrize("override", ["a.b", "=3", "a..b=3", "a.b.c=3"])
def test_a_malformed_override_is_refused(override):
    with pytest.raises(RequestError, match="--set"):
        apply_overrides({"a": {"b": 1}}, [override])


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(RequestError, match="no such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(RequestError, match="is a folder"):
        read_toml(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_text("a = = 3")
    with pytest.raises(RequestError, match="not valid TOML"):
        read_toml(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="cannot read"):
        read_toml(bad)
