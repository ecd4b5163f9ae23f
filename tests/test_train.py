import json
import math
import os
import shutil

import pytest
import torch
from helpers import ROOT, SHARED, fails, options, run, shared_file, torchrun

import train
from plaingpt.inference import scoring
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.schedules import get_lr
from plaingpt.training.settings import TrainConfig


def lines(out_dir, key):
    """The lines of metrics.jsonl that have `key`."""
    text = (out_dir / 'metrics.jsonl').read_text()
    return [line for line in map(json.loads, text.splitlines()) if key in line]


def weights(out_dir, which='latest'):
    return list(checkpoints.find(out_dir, which).load_model().parameters())


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_loss_falls_on_real_text(tiny, tmp_path):
    train.main([*tiny, '--max_iters=150', '--lr_decay_iters=150', '--learning_rate=1e-2',
                '--min_lr=1e-3', '--eval_interval=50', '--eval_iters=20', '--batch_size=16'])
    val = [line['val_loss'] for line in lines(tmp_path / 'out', 'val_loss')]
    assert abs(val[0] - math.log(93)) < 0.5
    assert val[0] > val[1] > val[2] > val[3] and val[3] < 2.9


def test_exactly_max_iters_updates_are_made_and_the_last_weights_evaluated(tiny, tmp_path):
    train.main([*tiny, '--max_iters=5', '--eval_interval=2'])
    assert [line['iter'] for line in lines(tmp_path / 'out', 'loss')] == [1, 2, 3, 4, 5]
    assert [line['iter'] for line in lines(tmp_path / 'out', 'val_loss')] == [0, 2, 4, 5]
    assert checkpoints.find(tmp_path / 'out').iter_num == 5
    found = checkpoints.find(tmp_path / 'out')
    model = found.load_model()
    optimizer = build_optimizer(model, TrainConfig(learning_rate=1e-3), 'cpu')
    found.load_optimizer(optimizer, model)
    assert {int(state['step']) for state in optimizer.state.values()} == {5}


def test_a_logged_loss_is_the_mean_over_all_micro_batches(tiny, tmp_path):
    for accumulation, batch_size in ((4, 2), (1, 8)):
        out_dir = tmp_path / f'out{accumulation}'
        train.main([*tiny, f'--out_dir={out_dir}', f'--batch_size={batch_size}',
                    f'--gradient_accumulation_steps={accumulation}'])
    a, b = (lines(tmp_path / f'out{n}', 'loss') for n in (4, 1))
    for x, y in zip(a, b, strict=True):
        assert x['loss'] == pytest.approx(y['loss'], rel=1e-6)
        assert x['grad_norm'] == pytest.approx(y['grad_norm'], rel=1e-5)
    for x, y in zip(weights(tmp_path / 'out4'), weights(tmp_path / 'out1'), strict=True):
        assert torch.allclose(x, y, atol=1e-5)


NEWER = options(optimizer='normuon', rotary=True, rmsnorm=True, qk_norm=True, mlp='relu2',
                tied_head=False, logit_softcap=15.0, zero_init=True, lr_schedule='wsd', conv=4,
                rotary_share=0.5, embedding_norm=True, qk_scale=0.3, value_embeddings=True,
                head_bias=True, softcap='sqrt', muon_scale='original', muon_iterations='exact',
                document_attention=True, document_start=0)  # lines are documents


@pytest.mark.parametrize('recipe', [[], NEWER], ids=['gpt2', 'newer'])
def test_two_processes_compute_what_one_does(tiny, tmp_path, recipe):
    tiny = [*tiny, *recipe]
    torchrun(2, 'train.py', *tiny, f'--out_dir={tmp_path}/two')
    train.main([*tiny, f'--out_dir={tmp_path}/one'])
    for key in ('loss', 'grad_norm', 'train_loss', 'val_loss'):
        one, two = ([line[key] for line in lines(tmp_path / name, key)] for name in ('one', 'two'))
        assert one == pytest.approx(two, abs=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in
               zip(weights(tmp_path / 'one'), weights(tmp_path / 'two'), strict=True))


@pytest.mark.parametrize(('dtype', 'recipe'), [
    ('float32', []), ('bfloat16', []), ('float16', []), ('bfloat16', NEWER),
    ('float32', options(optimizer='sgd', learning_rate=0.1, lr_schedule='linear', mlp='swiglu'))])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tiny, tmp_path, dtype, recipe):
    tiny = [*tiny, f'--dtype={dtype}', '--dropout=0.2', *recipe]
    train.main([*tiny, f'--out_dir={tmp_path}/whole'])
    shutil.copytree(tmp_path / 'whole', tmp_path / 'cut')
    shutil.rmtree(checkpoints.find(tmp_path / 'cut').path)  # iteration 6; 3 remains
    train.main([*tiny, f'--out_dir={tmp_path}/cut', '--init_from=resume'])
    assert same(weights(tmp_path / 'whole'), weights(tmp_path / 'cut'))
    for key in ('loss', 'grad_norm', 'val_loss'):
        whole, cut = ([(line['iter'], line[key]) for line in lines(tmp_path / name, key)]
                      for name in ('whole', 'cut'))
        assert whole == cut


@pytest.fixture
def restored(monkeypatch):
    """What deterministic=True sets in this process is as before after the test."""
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', '')
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG')
    yield monkeypatch
    torch.use_deterministic_algorithms(False)


def test_on_a_cpu_a_deterministic_run_has_the_bits_of_any_other(tiny, tmp_path, restored):
    tiny = [*tiny, '--dropout=0.2', '--value_embeddings', '--conv=4', '--rotary']
    for wanted in (True, False):
        train.main([*tiny, f'--deterministic={wanted}', f'--out_dir={tmp_path}/{wanted}'])
        assert torch.are_deterministic_algorithms_enabled() == wanted
    assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'
    assert same(weights(tmp_path / 'True'), weights(tmp_path / 'False'))


def test_what_cannot_be_deterministic_is_one_line(tiny, tmp_path, capsys, restored):
    def put(_):  # of which torch has no deterministic kernel on any device
        torch.use_deterministic_algorithms(True)
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))

    assert 'deterministic=True: torch has no deterministic put_' in fails(capsys, restored, put)
    restored.setenv('CUBLAS_WORKSPACE_CONFIG', ':8:8')
    line = fails(capsys, restored, train.main, *tiny, '--deterministic')
    assert 'CUBLAS_WORKSPACE_CONFIG=:8:8' in line and ':4096:8' in line
    assert not (tmp_path / 'out' / 'metrics.jsonl').exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('compile', [False, True])
@pytest.mark.parametrize('dtype', ['float32', 'auto'])
def test_on_a_gpu_two_deterministic_runs_have_the_same_bits(tiny, tmp_path, restored, dtype,
                                                            compile):
    tiny = [*tiny, *NEWER, *options(device='cuda', dtype=dtype, compile=compile, dropout=0.2,
                                    n_embd=128, block_size=128, batch_size=32)]
    for name in ('one', 'two'):
        torch._dynamo.reset()
        train.main([*tiny, '--deterministic', f'--out_dir={tmp_path}/{name}'])
    assert same(weights(tmp_path / 'one'), weights(tmp_path / 'two'))


def test_auto_starts_once_and_resumes_from_then_on(tiny, tmp_path, capsys):
    train.main([*tiny, '--init_from=auto', '--max_iters=3'])
    assert 'resumed' not in capsys.readouterr().out
    train.main([*tiny, '--init_from=auto'])
    assert 'resumed from' in capsys.readouterr().out
    assert checkpoints.find(tmp_path / 'out').iter_num == 6


def test_a_run_from_scratch_moves_an_earlier_one_aside(tiny, tmp_path, capsys):
    train.main(tiny)
    before = weights(tmp_path / 'out')
    train.main([*tiny, '--seed=2'])
    assert 'old-001' in capsys.readouterr().out
    assert same(weights(tmp_path / 'out/old-001'), before)
    assert not same(weights(tmp_path / 'out'), before)
    assert len(lines(tmp_path / 'out', 'loss')) == 6


def test_eval_only_evaluates_once_and_writes_nothing(tiny, trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / 'out')
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / 'out').rglob('*') if p.is_file())
    train.main([*tiny, '--init_from=resume', '--eval_only'])
    out = capsys.readouterr().out
    expected = lines(trained, 'val_loss')[-1]['val_loss']
    assert out.count('val loss') == 1 and f'val loss {expected:.4f}' in out
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / 'out').rglob('*')
                  if p.is_file()) == before


def test_only_the_best_and_the_last_are_saved_when_asked(tiny, tmp_path):
    train.main([*tiny, '--always_save_checkpoint=False', '--learning_rate=0.0', '--min_lr=0.0',
                '--max_iters=9', '--lr_decay_iters=9', '--weight_decay=0.0'])
    # nothing was better than at iteration 0, so only the end is there, to go on from
    assert [c.iter_num for c in checkpoints.readable(tmp_path / 'out')] == [9]


def test_total_batch_size_decides_the_accumulation(tiny, tmp_path, capsys):
    train.main([*tiny, '--total_batch_size=512', '--max_iters=0'])
    assert '512 tokens a step' in capsys.readouterr().out
    assert TrainConfig(total_batch_size=2**19, batch_size=16).accumulation() == 32
    assert TrainConfig().accumulation() == 40


def test_the_learning_rate_warms_up_and_falls_on_a_cosine():
    config = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=9, lr_decay_iters=109)

    def lr(it):
        return get_lr(it, config)
    assert lr(0) == pytest.approx(0.1) and lr(4) == pytest.approx(0.5) and lr(9) == 1.0
    assert lr(59) == pytest.approx(0.55)
    assert lr(109) == pytest.approx(0.1) and lr(10**6) == 0.1
    assert all(lr(i) > lr(i + 1) for i in range(9, 108))


def test_each_schedule_begins_high_and_ends_low():
    ends = {}
    for name in ('cosine', 'linear', 'wsd', 'constant'):
        config = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=110,
                             lr_schedule=name, wsd_decay=0.5)
        assert get_lr(0, config) == pytest.approx(1 / 11) and get_lr(10, config) == 1.0
        ends[name] = get_lr(55, config), get_lr(85, config), get_lr(110, config)
    assert ends['linear'] == pytest.approx((0.595, 0.325, 0.1))
    assert ends['wsd'] == pytest.approx((1.0, 0.1 + 0.9 * 25 / 55, 0.1))
    assert ends['constant'] == (1.0, 1.0, 1.0)
    short = TrainConfig(warmup_iters=60, lr_decay_iters=100, lr_schedule='wsd', wsd_decay=1.0)
    assert get_lr(61, short) > 0.97 * short.learning_rate  # no jump where the warmup ends


def test_a_constant_learning_rate_is_constant(tiny, tmp_path):
    train.main([*tiny, '--decay_lr=False', '--learning_rate=0.003'])
    assert {line['lr'] for line in lines(tmp_path / 'out', 'lr')} == {0.003}


def test_a_model_starts_from_weights_in_the_hugging_face_layout(tmp_path, text_file, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    import prepare
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=32, n_embd=32, n_layer=2,
                                        n_head=2))
    theirs.save_pretrained(tmp_path / 'hf')
    prepare.main(['text', f'--input={text_file}', '--tokenizer=byte', f'--data_dir={tmp_path}/d'])
    arguments = [f'--dataset={tmp_path}/d', f'--out_dir={tmp_path}/out', '--block_size=16',
                 '--batch_size=4', '--gradient_accumulation_steps=1', '--max_iters=2',
                 '--eval_iters=1', '--learning_rate=1e-4', '--decay_lr=False', '--device=cpu']
    train.main([*arguments, f'--init_from={tmp_path}/hf'])
    assert '2 layers, 2 heads, 32 channels' in capsys.readouterr().out
    # and such a run resumes, though its config never named the shape
    train.main([*arguments, '--init_from=resume', '--max_iters=4'])
    assert checkpoints.find(tmp_path / 'out').iter_num == 4


def test_float16_scales_its_gradients(tiny, tmp_path):
    train.main([*tiny, '--dtype=float16', '--max_iters=3'])
    assert checkpoints.find(tmp_path / 'out').state['scaler']['scale'] > 1
    assert all(line['loss'] < 5 for line in lines(tmp_path / 'out', 'loss'))


def test_nothing_waits_for_the_device_on_steps_that_are_not_logged(tiny, monkeypatch):
    reads = []
    for name in ('item', 'tolist', '__float__', '__bool__'):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, o=original, n=name:
                            (reads.append(n), o(self))[1])
    counts = []
    for steps in (4, 9):
        reads.clear()
        train.main([*tiny, f'--max_iters={steps}', '--log_interval=100', '--eval_interval=100',
                    '--health_interval=0'])
        counts.append(len(reads))
    assert counts[0] == counts[1] > 0


# -----------------------------------------------------------------------------
# mistakes


def test_resuming_without_a_checkpoint_is_an_error(tiny, capsys, monkeypatch):
    assert 'no checkpoint there' in fails(capsys, monkeypatch, train.main, *tiny,
                                          '--init_from=resume')


def test_a_checkpoint_of_another_model_is_refused(tiny, trained, tmp_path, capsys, monkeypatch):
    shutil.copytree(trained, tmp_path / 'out')
    message = fails(capsys, monkeypatch, train.main, *tiny, '--init_from=resume', '--n_layer=3')
    assert 'n_layer=3 (it has 2)' in message
    assert checkpoints.find(tmp_path / 'out').iter_num == 6


def test_a_checkpoint_of_another_tokenizer_is_refused(tiny, trained, tmp_path, text_file, capsys,
                                                      monkeypatch):
    import prepare
    shutil.copytree(trained, tmp_path / 'out')
    prepare.main(['text', f'--input={text_file}', '--tokenizer=byte', f'--data_dir={tmp_path}/d'])
    assert 'another tokenizer' in fails(capsys, monkeypatch, train.main, *tiny,
                                        '--init_from=resume', f'--dataset={tmp_path}/d')


def test_a_folder_that_cannot_be_written_is_an_error(tiny, tmp_path, capsys, monkeypatch):
    (tmp_path / 'file').write_text('in the way')
    message = fails(capsys, monkeypatch, train.main, *tiny, f'--out_dir={tmp_path}/file/out')
    assert 'out_dir' in message and (tmp_path / 'file').read_text() == 'in the way'


def test_cuda_where_there_is_none_is_an_error(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert '--device=cpu' in fails(capsys, monkeypatch, train.main, *tiny, '--device=cuda')
    assert not (tmp_path / 'out').exists()


def test_nccl_without_cuda_is_an_error_and_said_once(tiny):
    done = torchrun(2, 'train.py', *tiny, '--backend=nccl', check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
    assert errors == ['error: backend=nccl needs a CUDA device, not cpu: leave it at auto']


# -----------------------------------------------------------------------------
# the whole way, as a user goes it


def test_the_commands_of_the_readme_work_in_an_empty_folder(tmp_path):
    source = shared_file('tinyshakespeare.txt')
    run(ROOT / 'prepare.py', 'shakespeare_char', f'--input={source}', cwd=tmp_path)
    out = run(ROOT / 'train.py', ROOT / 'config/shakespeare_char_cpu.py', '--max_iters=2',
              '--eval_iters=2', cwd=tmp_path)
    assert 'iter 2' in out and 'GPT of 804,096 parameters' in out
    out = run(ROOT / 'sample.py', '--out_dir=out-shakespeare-char-cpu', '--num_samples=1',
              '--max_new_tokens=20', cwd=tmp_path)
    assert '---------------' in out


def test_gpt2_tokens_train_and_sample(tmp_path, monkeypatch):
    source = shared_file('tinyshakespeare.txt')
    cache = str(SHARED / 'tiktoken_cache')
    run(ROOT / 'prepare.py', 'shakespeare', f'--input={source}', cwd=tmp_path,
        TIKTOKEN_CACHE_DIR=cache)
    run(ROOT / 'train.py', '--dataset=shakespeare', '--n_layer=1', '--n_head=2', '--n_embd=32',
        '--block_size=32', '--batch_size=2', '--gradient_accumulation_steps=1', '--max_iters=2',
        '--eval_iters=1', '--device=cpu', cwd=tmp_path)
    out = run(ROOT / 'sample.py', '--num_samples=1', '--max_new_tokens=5', '--start=To be',
              cwd=tmp_path, TIKTOKEN_CACHE_DIR=cache)
    assert 'To be' in out


# -----------------------------------------------------------------------------
# what a run tells of itself


def test_benchmarks_and_samples_come_on_time_and_change_nothing(tiny, tmp_path, capsys,
                                                                monkeypatch):
    train.main([*tiny, '--dropout=0.1', f'--out_dir={tmp_path}/plain'])
    questions = [scoring.Question('def', [' main'], 0, 'here'), scoring.Question('x', ['y'], 0, '')]
    monkeypatch.setattr(scoring, 'read_questions', lambda *_: questions)
    capsys.readouterr()
    train.main([*tiny, '--dropout=0.1', '--eval_tasks=lambada', '--eval_tasks_interval=3',
                '--sample_interval=2', '--sample_tokens=20', '--sample_start=import'])
    out = capsys.readouterr().out
    assert out.count('---------------\nimport') == 3
    assert out.count('lambada: acc ') == 2 and 'iter 3 | lambada' in out
    found = lines(tmp_path / 'out', 'lambada_acc')
    assert [line['iter'] for line in found] == [3, 6] and found[0]['lambada_questions'] == 2
    a, b = (checkpoints.find(tmp_path / name).load_model() for name in ('plain', 'out'))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
