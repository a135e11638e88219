"""The loop of a process that is kept for many jobs: they come in as lines of JSON, and each is answered by one line.

Importing torch takes two seconds and a proof or a calibration has dozens of jobs, so processes are started once and serve many
of them. Whatever a job prints goes to the log: the reply line is the only thing on the pipe.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from shoal.core.errors import EXIT_NO, Refusal, RequestError

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(handler: Handler) -> None:
    """Answer jobs until the parent closes the pipe. A job that raises is answered with its error, and the process goes on."""
    owner = os.getpid()
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answer = _answer(handler, json.loads(line))
        if os.getpid() != owner:
            os._exit(EXIT_NO)  # What a job forked and let return answers for nobody.
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
        # A trainer and its groups refer to each other; uncollected, each plan would leave its models and gloo's threads behind.
        gc.collect()
    # Not a return: threads of a broken group could keep the process alive.
    os._exit(0)


def _answer(handler: Handler, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"error": None, **handler(job)}
    # The boundary of the process: the parent decides what a failed job means, and one that calls exit has failed.
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        is_ours = type(error).__module__.startswith("shoal.")
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        is_request = isinstance(error, RequestError | Refusal)
        return {"error": text, "is_request": is_request, "where": where, "traceback": traceback.format_exc()}
