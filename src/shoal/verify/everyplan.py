"""Plans that ``shoal verify --all`` proves besides those of the layouts: parameter servers, and compressed gradients."""

from shoal.core.plan import Plan

COMPRESSED = {
    2: ("dp=2 compress=int8", "dp=2 zero=1 compress=int4", "dp=2 compress=topk:0.01", "dp=2 compress=powersgd:2"),
    3: ("dp=3 compress=int4",),
    4: ("dp=4 compress=sign", "dp=2 pp=2 compress=int8"),
}
"""By processes, a plan for each way in which gradients go compressed: what a codec does to a tensor depends on no plan."""


def server_plans(num_processes: int) -> list[Plan]:
    """Plans with parameter servers over so many processes: every rule on one server, backups and workers that are groups once
    there are enough."""
    workers = num_processes - 1
    if workers < 1:
        return []
    several = ["bsp", "ssp:1", "async", f"half:{max(2, workers - 1)},0.25", "downpour:2,2"]
    rules = ["bsp", "async"] if workers == 1 else several
    found = [Plan(ps=1, workers=workers, update=rule) for rule in rules]
    if num_processes >= 4:
        found.append(Plan(ps=2, workers=num_processes - 2, update="bsp", backup=1))
    if workers % 2 == 0:
        found += [
            Plan(ps=1, workers=workers // 2, update="bsp", tp=2),
            Plan(ps=1, workers=workers // 2, update="bsp", pp=2),
        ]
    return found
