"""Something that answers lm-eval's tasks by a rule, in place of a model."""

import tiny_tokenizers
from lm_eval.api.model import LM

from remoe_cli.errors import command
from remoe_cli.measure.arms import Arm
from remoe_cli.measure.tasks import TaskOptions, Tasks

ARMS = [Arm("base", "base", None), Arm("remoe", "tuned", None)]


class Answering(LM):
    """Says what `answer` says of (task, doc): a text, or the index of the choice that it takes."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.prompts = answer, []

    def generate_until(self, requests, disable_tqdm=False):
        self.prompts += [one.args[0] for one in requests]
        return [self.answer(one.task_name, one.doc) for one in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        self.prompts += [one.args[0] for one in requests]
        return [(-0.5 if self.answer(one.task_name, one.doc) == one.idx else -2.0, False) for one in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


def loaded(**options) -> Tasks:
    return Tasks(TaskOptions(**options), tiny_tokenizers.wrapped(), lambda **changes: command("eval", **changes))


def scores(tasks: Tasks) -> dict:
    """(task, metric, filter) -> the arms' scores, and the tuned arm's whole entry."""
    return {
        (row["task"], one["metric"], one["filter"]): ([arm["score"] for arm in one["arms"]], one["arms"][-1])
        for row in tasks.rows(ARMS)
        for one in row["metrics"]
    }
