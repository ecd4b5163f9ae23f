"""`make test` catches mistakes in the lines that everything rests on.

Each line is broken in a copy of the project, where the named test, one of those that `make test`
runs, has to fail.
"""

import subprocess
import sys

import pytest
from processes import PATIENCE_S, ROOT, copy_project

# file, line, what it becomes, test that fails then
MISTAKES = {
    'attention sees the future': (
        'model.py', 'is_causal = mask is None and cache is None', 'is_causal = False',
        'test_model.py::test_a_token_sees_only_those_before_it'),
    'targets are not shifted': (
        'plaingpt/core/batches.py', 'sequences[:, 1:].contiguous()',
        'sequences[:, :-1].contiguous()',
        'data/test_batches.py::test_targets_are_the_tokens_one_position_later'),
    'the loss is not divided by the micro-steps': (
        'train.py', 'else loss / self.micro_steps', 'else loss',
        'core/test_equal_runs.py::test_a_run_is_the_same_however_its_steps_are_shared_out'),
    'a resumed run begins with other data': (
        'plaingpt/core/batches.py', 'self.resume_offset += sequences - self.sequences_before(step)',
        'self.resume_offset += sequences',
        'core/test_equal_runs.py::test_a_resumed_run_matches_the_uninterrupted_one'),
    'checksums are not compared': (
        'plaingpt/core/checkpoint.py', "if sha256 != chunk['sha256']", 'if not sha256',
        'core/test_checkpoint.py::test_every_flipped_bit_is_found'),
    'gradients are not clipped': (
        'train.py', 'self.grad_clip or math.inf', 'math.inf',
        'test_train.py::test_each_step_has_the_learning_rate_of_the_schedule_with_a_'
        'clipped_gradient'),
    'the cosine rises': (
        'plaingpt/core/schedules.py', '0.5 * (1 + math.cos(', '0.5 * (1 - math.cos(',
        'core/test_schedules.py::test_the_learning_rate_falls_on_a_cosine_after_a_warmup'),
    'cached positions are off by one': (
        'plaingpt/inference/generation.py', 'self.new = slice(begin, self.end)',
        'self.new = slice(begin + 1, self.end + 1)',
        'inference/test_generation.py::test_cached_text_is_that_of_whole_forward_passes'),
    'the loss is also over what users say': (
        'plaingpt/core/packing.py', 'targets[torch.from_numpy(~loss_mask[:, 1:])] = -1', 'pass',
        'data/test_packing.py::test_each_token_of_the_answers_is_a_target_once'),
    'no end of text before a document': (
        'plaingpt/data/encoding.py', 'prefix = [self.separator] if', 'prefix = [] if',
        'data/test_splits.py::test_more_of_a_corpus_has_the_same_validation_text'),
}


@pytest.fixture(scope='module')
def copy(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp('copy') / 'plaingpt')


def passes(folder, *tests):
    done = subprocess.run(
        [sys.executable, '-B', '-m', 'pytest', '-q', '-x', '-n', '0', *tests], cwd=folder,
        capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: tests failed
    return done.returncode == 0


@pytest.mark.parametrize('mistake', MISTAKES)
def test_each_line_and_each_test_is_there(mistake):
    file, line, _, test = MISTAKES[mistake]
    assert (ROOT / file).read_text(encoding='utf-8').count(line) == 1
    test_file, function = test.split('::')
    assert f'def {function}(' in (ROOT / 'tests' / test_file).read_text(encoding='utf-8')


@pytest.mark.slow
@pytest.mark.parametrize('mistake', MISTAKES)
def test_make_test_catches_a_mistake_in_a_central_line(copy, mistake):
    file, line, broken, test = MISTAKES[mistake]
    code = (copy / file).read_text(encoding='utf-8')
    try:
        (copy / file).write_text(code.replace(line, broken), encoding='utf-8')
        assert not passes(copy, f'tests/{test}')
    finally:
        (copy / file).write_text(code, encoding='utf-8')


@pytest.mark.slow
def test_without_a_mistake_these_tests_pass(copy):
    assert passes(copy, *(f'tests/{test}' for *_, test in MISTAKES.values()))
