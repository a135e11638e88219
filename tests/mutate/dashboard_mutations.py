"""Mutations of the dashboard: what strangers must not get, and what a person must see."""

from promises import Mutation

STRANGERS = "`shoal dash` answers nobody without its key"
INSIDE = "nothing outside the folder of runs is read or served"
SEEN = "a spike of one step is in what a chart is sent"
SLOW = "a rank that is a fifth busier than the others"

DASHBOARD = [
    Mutation(
        promise=STRANGERS,
        what="any cookie of the right name is the key",
        file="src/shoal/dashboard/server/access.py",
        old='        return any(_same(value, self._session) for value in _cookies(headers.get("cookie", ""), self.cookie))',
        new='        return any(value for value in _cookies(headers.get("cookie", ""), self.cookie))',
        test="tests/unit/dashboard/server/test_access.py::test_only_the_right_cookie_is_a_key",
        seconds=2,
    ),
    Mutation(
        promise=STRANGERS,
        what="a code lets in whoever has it, again and again",
        file="src/shoal/dashboard/server/access.py",
        old="        self._code = None\n",
        new="",
        test="tests/unit/dashboard/server/test_access.py::test_a_code_works_once",
        seconds=2,
    ),
    Mutation(
        promise=STRANGERS,
        what="any name will do",
        file="src/shoal/dashboard/server/access.py",
        old="        if name is None or name not in self._names:",
        new="        if name is None:",
        test="tests/unit/dashboard/server/test_access.py::test_foreign_names_and_origins_are_refused",
        seconds=2,
    ),
    Mutation(
        promise=INSIDE,
        what="a link may lead anywhere",
        file="src/shoal/dashboard/runs/files.py",
        old="        if not real.startswith(f\"{str(root).rstrip('/')}/\"):",
        new="        if not real:",
        test="tests/unit/dashboard/runs/test_following.py::test_what_is_no_plain_file_inside_is_not_read",
        seconds=2,
    ),
    Mutation(
        promise=SEEN,
        what="the greatest value of a bucket is the least",
        file="src/shoal/dashboard/runs/pyramid.py",
        old="            np.fmax.reduceat(self.high, starts),",
        new="            np.fmin.reduceat(self.high, starts),",
        test="tests/unit/dashboard/runs/test_pyramid.py::test_buckets_are_what_all_their_values_say",
        seconds=2,
    ),
    Mutation(
        promise=SLOW,
        what="waiting for others counts as work",
        file="src/shoal/dashboard/runs/curves.py",
        old='    return np.maximum(table.column("seconds") - waited - table.column("data_seconds"), 0.0)',
        new='    return np.maximum(table.column("seconds") - table.column("data_seconds"), 0.0) + 0.0 * waited',
        test="tests/unit/dashboard/views/test_ranks.py::test_what_is_shown_is_what_the_events_say",
        seconds=2,
    ),
]
