import json
import math
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F
from foreign_models import opened
from processes import ROOT, fails, launch
from sample_data import write_tasks

import evaluate
import export
import sample
import train
from model import GPT, GPTConfig
from plaingpt.core.dataset import open_dataset
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.inference import lm_eval_model
from plaingpt.inference.hf_export import write_hf
from plaingpt.inference.open_weights import ModelChoice, load
from plaingpt.system.errors import UserError


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """A folder with a small model of bytes whose weights make a difference."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=128, vocab_size=257, n_layer=2, n_head=4, n_embd=32))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    folder = tmp_path_factory.mktemp('exported')
    write_hf(folder, model, ByteTokenizer())
    return folder


def scores_of(tmp_path, *arguments):
    (tmp_path / 'scores.json').unlink(missing_ok=True)
    evaluate.main([*arguments, '--device=cpu', f'--output={tmp_path}/scores.json'])
    return json.loads((tmp_path / 'scores.json').read_text())['results']


@torch.no_grad()
def loss_of_all(model, ids, T):
    """The mean loss of all ids but the first, T of them at a time, the last ones after others."""
    losses = torch.cat([F.cross_entropy(model.eval()(ids[None, start:start + T])[0][0],
                                        ids[start + 1:start + T + 1], reduction='none')
                        for start in (*range(0, len(ids) - T, T), len(ids) - 1 - T)])
    targets = len(ids) - 1
    return (losses[:targets // T * T].sum() + losses[len(losses) - targets % T:].sum()).item() \
        / targets


# -----------------------------------------------------------------------------
# lm-evaluation-harness


def requests(kind, *arguments):
    instance = pytest.importorskip('lm_eval.api.instance')
    return [instance.Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


@pytest.fixture(scope='module')
def models(exported):
    """A model as lm_eval asks ours, in slices, and as it asks transformers."""
    HFLM = pytest.importorskip('lm_eval.models.huggingface').HFLM
    model, tokenizer, *_ = load(ModelChoice(str(exported)))
    ours = type('Ours', (lm_eval_model.LmEvalModel, HFLM), {})(model, tokenizer, 2)
    return ours, HFLM(pretrained=str(exported), max_length=128, dtype='float32', device='cpu')


def test_lm_eval_gets_the_likelihoods_of_transformers(models):
    ours, theirs = models
    pairs = requests('loglikelihood', ('The cat', ' sat'), ('', 'Dogs'), ('a ' * 90, 'b c'),
                     *(('x', 'y' * n) for n in (1, 128, 3)))
    for (logp, is_greedy), expected in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs),
                                           strict=True):
        assert logp == pytest.approx(expected[0], rel=1e-6)
        assert is_greedy == expected[1]
    texts = requests('loglikelihood_rolling', ('short',), ('long text, ' * 36 + 'end',))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(
        theirs.loglikelihood_rolling(texts), rel=1e-6)


def test_a_repetitive_text_has_the_likelihood_of_its_tokens(models):
    text = 'eight by' * 56  # the tokens of its last two windows are the same
    logp, = models[0].loglikelihood_rolling(requests('loglikelihood_rolling', (text,)))
    losses = loss_of_all(models[0].model.gpt, torch.tensor([256, *text.encode()]), 128)
    assert logp == pytest.approx(-losses * len(text), rel=1e-6)


def test_lm_eval_gets_the_text_of_transformers(models):
    ours, theirs = models
    whole, = ours.generate_until(requests('generate_until', ('The cat', {'max_gen_toks': 20})))
    stop = whole[5]
    stopped = requests('generate_until', *((prompt, {
        'max_gen_toks': 20, 'until': [stop], 'do_sample': False})
        for prompt in ('The cat', 'A dog that ', 'cut ' * 40)))
    texts = ours.generate_until(stopped)
    assert texts == theirs.generate_until(stopped)
    assert texts[0] == whole[:whole.index(stop)]


def test_an_answer_longer_than_block_size_is_refused(exported, tmp_path, monkeypatch):
    task = write_tasks(tmp_path, monkeypatch, 'output_type: loglikelihood\n'
                                              'doc_to_target: "{{text * 20}}"\n')[-1]
    with pytest.raises(UserError, match='block_size=128'):
        evaluate.main([f'--init_from={exported}', f'--tasks={task}', '--device=cpu'])


def test_tasks_of_lm_eval_are_scored_beside_text(exported, tmp_path, monkeypatch):
    ending, word, _ = write_tasks(tmp_path, monkeypatch)
    scores = scores_of(tmp_path, f'--init_from={exported}', f'--tasks={ending},text,{word}',
                       '--limit=4', f'--data={tmp_path}/questions.jsonl')
    assert scores.keys() == {'ending', 'text', 'word'}
    assert scores['ending']['questions'] == scores['word']['questions'] == 4
    assert 0 <= scores['ending']['acc'] <= 1 < scores['word']['perplexity']


# -----------------------------------------------------------------------------
# text


def test_the_validation_loss_is_that_of_each_token_once(trained, char_data, tmp_path):
    scores = scores_of(tmp_path, f'--out_dir={trained}')['val']
    model, *_ = load(ModelChoice(out_dir=trained))
    stream = open_dataset(char_data).split('val')
    loss = loss_of_all(model, torch.from_numpy(stream.read(0, len(stream))), 16)
    assert (len(stream) - 1) % 16
    assert scores['loss'] == pytest.approx(loss, abs=1e-5)
    assert scores['perplexity'] == pytest.approx(math.exp(loss), rel=1e-4)
    # a character of this text is a byte, so bits a byte are bits a token
    assert scores['bits_per_byte'] == pytest.approx(scores['loss'] / math.log(2))
    assert 0 < scores['loss_stderr'] < 0.1


def test_every_command_reads_a_run_of_1_0(tmp_path, capsys):
    shutil.copytree(ROOT / 'tests/data/format_1', tmp_path / 'old')
    run = f'--out_dir={tmp_path}/old/run'
    scores = scores_of(tmp_path, run, f'--dataset={tmp_path}/old/dataset')['val']
    state = json.loads(next((tmp_path / 'old/run').rglob('state.json')).read_text())
    assert scores['loss'] == pytest.approx(state['val_loss'], abs=0.05)  # that of a few batches
    sample.main([run, '--start=The', '--num_samples=1', '--max_new_tokens=9', '--device=cpu'])
    assert '\nThe' in capsys.readouterr().out
    export.main([run, f'--dest={tmp_path}/hf'])
    assert opened(tmp_path / 'hf').config.n_layer == state['model']['n_layer']


def test_the_scores_do_not_depend_on_batch_size_or_processes(trained, tmp_path):
    results = [scores_of(tmp_path, f'--out_dir={trained}', f'--batch_size={n}')['val']
               for n in (7, 10**12)]  # of which no batch is made
    launch(evaluate.main, 2, tmp_path, f'--out_dir={trained}', '--device=cpu',
           f'--output={tmp_path}/two.json')
    results.append(json.loads((tmp_path / 'two.json').read_text())['results']['val'])
    for key in ('loss', 'loss_stderr', 'bits_per_byte'):
        values = [scores[key] for scores in results]
        assert max(values) - min(values) < 1e-6


@pytest.mark.parametrize('n', [1, 128, 129, 300])
def test_each_token_of_a_file_is_scored_once(exported, tmp_path, n):
    text = ('naïve text, ' * 30).encode()[:n].decode()
    (tmp_path / 'book.txt').write_text(text, encoding='utf-8')
    scores = scores_of(tmp_path, f'--init_from={exported}', '--tasks=text',
                       f'--data={tmp_path}/book.txt')['text']
    model, *_ = load(ModelChoice(str(exported)))
    ids = torch.tensor([256, *text.encode()])  # the end of text before it
    loss = loss_of_all(model, ids, min(128, n))
    assert scores['loss'] == pytest.approx(loss, abs=1e-5)
    assert scores['bits_per_byte'] == pytest.approx(loss / math.log(2), abs=1e-5)


def test_what_tasks_of_lm_eval_lack_is_told_before_anything_is_done(
        tiny, trained, tmp_path, capsys, monkeypatch):
    task = write_tasks(tmp_path, monkeypatch)[0]

    def check(tasks, named):
        for main, argv in ((evaluate.main, [f'--out_dir={trained}', f'--tasks=val,{tasks}']),
                           (train.main, [*tiny, f'--eval_tasks={tasks}', '--dataset=nowhere'])):
            assert named in fails(capsys, monkeypatch, main, *argv)
        assert not list(tmp_path.glob('out/*'))
    check('vla', "'vla'")
    (tmp_path / 'questions.jsonl').unlink()
    check(task, 'questions.jsonl')
    monkeypatch.setitem(sys.modules, 'lm_eval.tasks', None)
    check('hellaswag', 'lm_eval[hf]')
