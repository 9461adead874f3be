"""Each promise of README.md is covered by tests that run by default."""

from __future__ import annotations

import re

import pytest
from support.running import ROOT

PROMISES = {
    "An interrupted run resumes bit for bit.":
        "killed_at_random_moments_it_ends_as_if_nothing_had_happened "
        "a_stop_request_saves_exits_75_and_the_job_resumes_bit_for_bit",
    "The order of the data depends on the seed alone":
        "row_i_of_a_step_does_not_depend_on_start_ranks_or_micro_batches "
        "two_ranks_train_what_one_does_and_resume_each_other",
    "Token files are the same bytes for any number of processes":
        "any_number_of_ranks_writes_the_same_bytes "
        "a_killed_rank_ends_the_job_and_a_rerun_gives_the_same_bytes",
    "A checkpoint is complete or absent.":
        "after_a_kill_at_any_moment_committed_checkpoints_are_complete every_flipped_byte_is_found "
        "a_damaged_checkpoint_is_skipped_by_name "
        "a_sealed_checkpoint_that_dtt_never_wrote_is_rejected",
    "A job records how it ended":
        "a_killed_rank_is_named_by_the_other_in_the_message_and_in_exit_json "
        "a_frozen_rank_is_reported_because_it_is_silent "
        "how_an_attempt_ended_decides_whether_the_job_is_requeued",
    "An export is published only after `transformers` has computed the same logits from it.":
        "transformers_loads_and_generates_from_an_export verification_finds_one_changed_weight "
        "other_logits_than_those_of_transformers_are_refused "
        "what_is_refused_is_named",
    "Benchmark scores are those of lm-evaluation-harness":
        "scores_are_those_of_lm_eval_with_transformers "
        "scores_do_not_depend_on_the_number_of_ranks_to_the_last_bit",
    "A mistake is one message":
        "a_mistake_is_reported_with_what_to_do "
        "all_mistakes_are_reported_at_once_with_location_and_nearest_key",
    "A secret in a configuration is refused":
        "a_secret_in_the_configuration_is_refused_and_not_repeated no_secret_is_stored_or_printed",
}  # fmt: skip
"""The promises, and the names of their tests without the prefix `test_`."""


def test_every_promise_of_the_readme_has_tests() -> None:
    promises = re.findall(r"^- \*\*(.+?)\*\*", section("What you get").replace("\n  ", " "), re.M)
    assert promises == list(PROMISES)


def section(title: str) -> str:
    """Return the text of a section of README.md."""
    return (ROOT / "README.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module", name="texts")
def read_tests() -> list[str]:
    return [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]


@pytest.mark.parametrize("name", [name for names in PROMISES.values() for name in names.split()])
def test_it_exists_and_runs_by_default(name: str, texts: list[str]) -> None:
    definition = re.compile(rf"^((?:.+\n)*)def test_{name}\(", re.M)
    decorators = [match[1] for text in texts for match in definition.finditer(text)]
    assert decorators
    assert not any("@pytest.mark.slow\n" in text for text in decorators)
