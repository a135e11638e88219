"""What hosts must have in common, and the interface by which each is reached."""

import msgspec
import pytest

from shoal.core.errors import RequestError
from shoal.launch.hosts.admission import choose_addresses, folder_problems, same_machine_problems, version_problems
from shoal.launch.hosts.messages import Entered, Hello, Interface

LOOPBACK = Interface("lo", "127.0.0.1")


def hello(address: str = "10.0.0.1", **others: object) -> Hello:
    made = Hello(
        hostname="x", python="3.11", shoal="1", torch="2.13", code="c", cores=2,
        interfaces=(LOOPBACK, Interface("eth0", address)),
    )  # fmt: skip
    return msgspec.structs.replace(made, **others)


@pytest.mark.parametrize("name", ["python", "shoal", "torch", "code"])
def test_a_host_with_something_else_is_named_with_both(name: str) -> None:
    (problem,) = version_problems({"a": hello(), "b": hello(), "c": hello(**{name: "other"})})
    assert problem.startswith(f"host c has {name} other and host a has {getattr(hello(), name)}: ")


def test_hosts_that_fit_together() -> None:
    assert version_problems({"a": hello(), "b": hello()}) == []


def test_two_names_of_one_machine() -> None:
    assert "a and b are one machine" in same_machine_problems({"a": hello(), "b": hello()}, ["a", "b"])[0]
    assert same_machine_problems({"a": hello(), "b": hello("10.0.0.2")}, ["a", "b"]) == []
    assert same_machine_problems({"127.0.0.1": hello(), "localhost": hello()}, ["127.0.0.1", "localhost"]) == []


def test_the_folder_of_another_host_is_named() -> None:
    entered = {"a": Entered(token="t"), "b": Entered(), "c": Entered(problem="no")}
    (found,) = folder_problems("/r", "t", entered, first="a")
    assert found.startswith("host c: /r cannot be used: no;")
    del entered["c"]
    assert folder_problems("/r", "t", entered, first="a") == [], "b has a run directory of its own"
    (found,) = folder_problems("/r", "t", entered, first="a", why_shared="it has to be shared")
    assert found.startswith("host b does not share /r"), "any host may be the last one"
    (found,) = folder_problems("/r", "t", entered, first="b")
    assert found.startswith("host b, which has rank 0, does not see /r as it is here: start the command on b")


def test_the_interface_is_the_one_that_the_name_leads_to_and_never_loopback() -> None:
    """Debian gives a host's own name 127.0.1.1; only what others can reach counts."""
    two = (LOOPBACK, Interface("eth0", "10.0.0.1"), Interface("eth1", "10.1.0.1"))
    chosen = choose_addresses({"a": hello(interfaces=two)}, resolve=lambda name: ["127.0.1.1", "10.1.0.1"])
    assert chosen["a"].name == "eth1"
    chosen = choose_addresses(
        {"a": hello(interfaces=two, shell_address="10.0.0.1")}, resolve=lambda name: ["127.0.1.1"]
    )
    assert chosen["a"].name == "eth0"
    assert choose_addresses({"a": hello(interfaces=two)}, network="10.1.0.0/16")["a"].name == "eth1"
    assert choose_addresses({"a": hello(interfaces=two)}, network="eth0")["a"].address == "10.0.0.1"
    with pytest.raises(RequestError, match="which interface of host a"):
        choose_addresses({"a": hello(interfaces=two)}, resolve=lambda name: [])


def test_loopback_beside_another_host_is_refused() -> None:
    with pytest.raises(RequestError, match="host localhost is only reached over loopback"):
        choose_addresses({"localhost": hello(), "b": hello("10.0.0.2")}, resolve=lambda name: [])
