import gzip
import json
import math
import shutil

import numpy as np
import pytest
import torch
from helpers import ROOT, exit_code, fails, fork, ranks

import evaluate
import export
import prepare
import sample
import train
from model import GPT, GPTConfig
from plaingpt.data.dataset import open_dataset
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.inference import scoring
from plaingpt.inference.hf_export import write_hf
from plaingpt.training import model_choice

# Questions of ours, as the published files have them.
HELLASWAG = [
    dict(ind=1, activity_label='Baking bread', ctx_a='A woman kneads dough on a table.',
         ctx_b='she', ctx='A woman kneads dough on a table. she',
         endings=['puts it into the oven.', 'drives it to the moon.', 'paints the  dough green.',
                  'is a table.'], label=0, split='val', split_type='indomain', source_id='own~1'),
    dict(ind=2, activity_label='Home and Garden', ctx_b='',
         ctx_a='[header] How to water a plant [title] Find the plant. [step] It is green.',
         ctx='[header] How to water a plant [title] Find the plant. [step] It is green.',
         endings=['Pour water [substeps] slowly.', 'Sing.', 'Sell the plant, then the garden.',
                  'Wait for winter.'], label='0', split='val', split_type='zeroshot',
         source_id='own~2'),
    dict(ind=3, activity_label='Chess', ctx_a='Two men sit at a board.', ctx_b='one of them',
         ctx='Two men sit at a board. one of them',
         endings=['swims.', 'eats the queen slowly.', 'moves a pawn.', 'moves a house, then two.'],
         label=2, split='val', split_type='indomain', source_id='own~3'),
]
LAMBADA = [{'text': 'the cat sat on the mat and looked at the other cat'},
           {'text': '"why?" asked ann.\n"because," said tom, and closed the old door'},
           {'text': 'aaa aaa aaa aaa'}]


@pytest.fixture
def files(tmp_path):
    for name, rows in (('hellaswag', HELLASWAG), ('lambada', LAMBADA)):
        (tmp_path / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    return tmp_path


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """A folder with a small model of bytes whose weights make a difference."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=128, vocab_size=257, n_layer=2, n_head=4, n_embd=32))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    folder = tmp_path_factory.mktemp('exported')
    write_hf(folder, model, ByteTokenizer(), '')
    return folder


def scores_of(tmp_path, *arguments):
    (tmp_path / 'scores.json').unlink(missing_ok=True)
    evaluate.main([*arguments, '--device=cpu', f'--output={tmp_path}/scores.json'])
    return json.loads((tmp_path / 'scores.json').read_text())['results']


@pytest.fixture(scope='module')
def in_transformers(exported):
    """(context, answer) → the log-likelihood of the answer in transformers and whether it is the
    likeliest, in float64, token by token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(exported).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)

    def score(context, answer):
        ids = tokenizer(context + answer).input_ids
        n = len(ids) - len(tokenizer(context).input_ids)
        ids = ids[-129:]
        with torch.no_grad():
            logp = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        at = range(len(ids) - 1 - n, len(ids) - 1)
        return (sum(logp[i, ids[i + 1]].item() for i in at),
                all(logp[i].argmax().item() == ids[i + 1] for i in at))
    return score


EXPECTED_CONTEXTS = [  # worded by hand as lm-evaluation-harness words them
    'Baking bread: A woman kneads dough on a table. She',
    'Home and Garden: How to water a plant. Find the plant. It is green.',
    'Chess: Two men sit at a board. One of them']


def log_likelihoods_of(folder, questions, batch_size=5, dtype=torch.float64):
    model, tokenizer, *_ = model_choice.load(str(folder))
    model.to(dtype)
    rows = [scoring.encode_answer(question, answer, tokenizer, 128)
            for question in questions for answer in question.answers]
    return scoring.log_likelihoods(model, rows, batch_size, torch.no_grad(), '')


def test_hellaswag_is_worded_and_scored_as_by_transformers(exported, in_transformers, files):
    questions = scoring.read_questions('hellaswag', files / 'hellaswag.jsonl')
    ours = log_likelihoods_of(exported, questions)[:, 0].reshape(3, 4)
    right = right_norm = 0
    for i, (row, question) in enumerate(zip(HELLASWAG, questions, strict=True)):
        endings = [e.replace('[substeps]', '').replace('  ', ' ') for e in row['endings']]
        assert question.context.strip() == EXPECTED_CONTEXTS[i]
        theirs = np.array([in_transformers(EXPECTED_CONTEXTS[i], ' ' + ending)[0]
                           for ending in endings])
        assert np.abs(ours[i] - theirs).max() < 1e-6
        right += theirs.argmax() == int(row['label'])
        right_norm += (theirs / [len(e) for e in endings]).argmax() == int(row['label'])
    scores = scores_of(files, f'--init_from={exported}', '--tasks=hellaswag',
                       f'--data={files}/hellaswag.jsonl')['hellaswag']
    assert scores['acc'] == right / 3 and scores['acc_norm'] == right_norm / 3


def test_acc_norm_divides_by_the_characters_of_the_ending():
    question = scoring.Question('', [' a long ending', ' short'], 0, '')
    found = scoring.hellaswag_scores(np.array([[-6.0, 0], [-5.0, 0]]), [question])
    assert (found['acc'], found['acc_norm']) == (0, 1)


def test_lambada_is_scored_as_by_transformers(exported, in_transformers, files):
    questions = scoring.read_questions('lambada', files / 'lambada.jsonl')
    ours = log_likelihoods_of(exported, questions)
    words = [row['text'].rindex(' ') for row in LAMBADA]  # where the last one begins
    theirs = [in_transformers(row['text'][:at], row['text'][at:])
              for row, at in zip(LAMBADA, words, strict=True)]
    assert np.abs(ours[:, 0] - [logp for logp, _ in theirs]).max() < 1e-6
    assert ours[:, 1].tolist() == [likeliest for _, likeliest in theirs]
    scores = scores_of(files, f'--init_from={exported}', '--tasks=lambada',
                       f'--data={files}/lambada.jsonl')['lambada']
    mean = sum(logp for logp, _ in theirs) / 3
    assert scores['perplexity'] == pytest.approx(math.exp(-mean), rel=1e-4)
    assert scores['acc'] == sum(likeliest for _, likeliest in theirs) / 3


def test_a_right_guess_counts_as_right(trained):
    model, tokenizer, *_ = model_choice.load('resume', trained)
    ids = model.generate(torch.tensor([tokenizer.encode('def main').tolist()]), 3, 0)[0]
    guess = tokenizer.decode(ids[-3:].tolist())
    wrong = guess[:-1] + ('a' if guess[-1] != 'a' else 'b')
    rows = [(tokenizer.encode('def main' + answer), slice(-3, None)) for answer in (guess, wrong)]
    scores = scoring.log_likelihoods(model, rows, 2, torch.no_grad(), '')
    assert scores[:, 1].tolist() == [1, 0] and scores[0, 0] > scores[1, 0]


# -----------------------------------------------------------------------------
# lm-evaluation-harness


@pytest.mark.slow
@pytest.mark.parametrize('task', ['hellaswag', 'lambada_openai'])
def test_scores_are_those_of_lm_evaluation_harness(exported, files, task):
    lm_eval = pytest.importorskip('lm_eval')
    name = task.partition('_')[0]
    split = 'validation' if name == 'hellaswag' else 'test'
    (files / 'local.yaml').write_text(
        f'include: {lm_eval.__path__[0]}/tasks/{name}/{task}.yaml\ntask: local\n'
        'dataset_path: json\ndataset_name: null\ntraining_split: null\ndataset_kwargs:\n'
        f'  data_files:\n    {split}: {files}/{name}.jsonl\n')
    theirs = scores_of(files, f'--init_from={exported}', '--lm_eval=local',
                       f'--include_path={files}')['local']
    ours = scores_of(files, f'--init_from={exported}', f'--tasks={name}',
                     f'--data={files}/{name}.jsonl')[name]
    assert theirs['questions'] == ours['questions'] == 3
    for key in {'acc', 'acc_norm', 'perplexity', 'acc_stderr'} & ours.keys():
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key


def test_each_kind_of_request_of_lm_eval_is_answered_as_by_its_model_of_transformers(exported):
    pytest.importorskip('lm_eval')
    pytest.importorskip('accelerate')
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from plaingpt.inference.lm_eval_model import lm_eval_model
    model, tokenizer, *_ = model_choice.load(str(exported))
    ours = lm_eval_model(model, tokenizer, 2, torch.no_grad())
    theirs = HFLM(pretrained=str(exported), max_length=128, dtype='float32', device='cpu')

    def requests(kind, *arguments):
        return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]
    pairs = requests('loglikelihood', ('The cat', ' sat'), ('', 'Dogs'), ('a ' * 90, 'b c'))
    texts = requests('loglikelihood_rolling', ('short',), ('long text ' * 40,))
    for found, expected in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs),
                               strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-4) and found[1] == expected[1]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(
        theirs.loglikelihood_rolling(texts), rel=1e-4)
    whole, = ours.generate_until(requests('generate_until', ('The cat', {'max_gen_toks': 20})))
    stop = whole[5]
    cut = {'max_gen_toks': 20, 'until': [stop], 'do_sample': False}
    assert ours.generate_until(requests('generate_until', ('The cat', cut))) \
        == theirs.generate_until(requests('generate_until', ('The cat', cut))) \
        == [whole[:whole.index(stop)]]


# -----------------------------------------------------------------------------
# text


def test_the_validation_loss_is_that_of_each_token_once(trained, char_data, tmp_path):
    scores = scores_of(tmp_path, f'--out_dir={trained}')['val']
    model, *_ = model_choice.load('resume', trained)
    stream = open_dataset(char_data).split('val', in_ram=True)
    losses = []
    with torch.no_grad():
        for start in range(0, len(stream) - 1, 16):
            ids = torch.from_numpy(stream.ram[start:start + 17].astype(np.int64))[None]
            logp = model(ids[:, :-1])[0].log_softmax(-1)
            losses += (-logp.gather(2, ids[:, 1:, None])).flatten().tolist()
    assert len(losses) == scores['tokens'] == len(stream) - 1
    assert scores['loss'] == pytest.approx(np.mean(losses), abs=1e-6)
    assert scores['perplexity'] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    # a character of this text is a byte, so bits a byte are bits a token
    assert scores['bits_per_byte'] == pytest.approx(scores['loss'] / math.log(2), rel=1e-3)
    assert 0 < scores['loss_stderr'] < 0.1


def test_a_run_of_an_older_version_is_sampled_evaluated_and_exported(tmp_path, capsys):
    shutil.copytree(ROOT / 'tests/data/format_1', tmp_path / 'old')
    run = f'--out_dir={tmp_path}/old/run'
    scores = scores_of(tmp_path, run, f'--dataset={tmp_path}/old/dataset')['val']
    state = json.loads(next((tmp_path / 'old/run').rglob('state.json')).read_text())
    assert scores['loss'] == pytest.approx(state['val_loss'], abs=0.05)  # that of a few batches
    sample.main([run, '--start=The', '--num_samples=1', '--max_new_tokens=9', '--device=cpu'])
    assert '\nThe' in capsys.readouterr().out
    export.main([run, f'--dest={tmp_path}/hf'])
    assert GPT.from_pretrained(tmp_path / 'hf').config.n_layer == state['model']['n_layer']


def test_the_loss_does_not_depend_on_batch_size_or_processes(trained, tmp_path):
    losses = [scores_of(tmp_path, f'--out_dir={trained}', f'--batch_size={n}')['val']['loss']
              for n in (7, 64)]
    pids = [fork(evaluate.main, f'--out_dir={trained}', '--device=cpu',
                 f'--output={tmp_path}/two.json', log=tmp_path / 'log', **rank)
            for rank in ranks(2)]
    assert [exit_code(pid) for pid in pids] == [0, 0], (tmp_path / 'log').read_text()
    losses.append(json.loads((tmp_path / 'two.json').read_text())['results']['val']['loss'])
    assert max(losses) - min(losses) < 1e-6


def test_bits_per_byte_of_a_file_count_all_its_bytes(exported, tmp_path, capsys):
    text = 'naïve text, ' * 30
    (tmp_path / 'book.txt').write_text(text, encoding='utf-8')
    scores = scores_of(tmp_path, f'--init_from={exported}', '--tasks=text',
                       f'--data={tmp_path}/book.txt')['text']
    assert scores['tokens'] == len(text.encode())  # the first one, too, after an end of text
    assert scores['bits_per_byte'] == pytest.approx(scores['loss'] / math.log(2))
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f'{tmp_path}/book.txt: loss ') and 'bits/byte (390 tokens)' in line


def test_a_file_is_scored_as_it_is_prepared(tmp_path):
    text = 'naïve\r\ntext\n\r' * 30
    for name, data in (('a.txt', text.encode('utf-8-sig')),
                       ('a.txt.gz', gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        prepare.main(['text', f'{tmp_path}/{name}', '--tokenizer=char', f'--data_dir={tmp_path}/d',
                      '--overwrite'])
        dataset = open_dataset(tmp_path / 'd')
        prepared = np.concatenate([dataset.split(split, in_ram=True).ram
                                   for split in ('train', 'val')])
        stream = scoring.TextStream(tmp_path / name, dataset.tokenizer())
        assert stream.ids.tolist() == prepared.tolist() and stream.bytes == len(text.encode())


def test_the_standard_error_is_that_of_repeated_draws():
    chance = np.random.default_rng(0)
    means = chance.normal(size=(2000, 100)).mean(1)
    _, stderr = scoring.mean_and_stderr(chance.normal(size=100))
    assert stderr == pytest.approx(np.std(means), rel=0.15)
    assert scoring.mean_and_stderr([1.0]) == (1.0, None)


def test_a_published_file_is_downloaded_once_and_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def download(url, sha256, advice):
        asked.append(url)
        return json.dumps(LAMBADA[0]).encode()
    monkeypatch.setattr(scoring, 'download', download)
    for _ in range(2):
        assert len(scoring.read_questions('lambada')) == 1
    assert asked == [scoring.BENCHMARKS['lambada'].url]


def test_without_a_network_benchmarks_name_the_file_before_anything_else_is_done(
        tiny, trained, tmp_path, capsys, monkeypatch):
    def no_network(*_, **__):
        raise OSError('no network here')
    monkeypatch.setattr('urllib.request.urlopen', no_network)
    monkeypatch.chdir(tmp_path)
    arguments = [*tiny, '--eval_tasks=lambada', '--eval_tasks_interval=6', '--max_iters=6']
    for main, argv in ((train.main, [*arguments, '--dataset=nowhere']),
                       (evaluate.main, [f'--out_dir={trained}', '--tasks=lambada'])):
        line = fails(capsys, monkeypatch, main, *argv)
        assert 'data/benchmarks/lambada_test.jsonl' in line and '--data=' not in line
    assert not (tmp_path / 'out').exists() and not (tmp_path / 'data').exists()
    (tmp_path / 'data/benchmarks').mkdir(parents=True)
    (tmp_path / 'data/benchmarks/lambada_test.jsonl').write_text('{"text": "usage of the parser"}')
    train.main(arguments)
    assert 'lambada: acc' in capsys.readouterr().out


def test_mistakes_are_one_line(trained, files, capsys, monkeypatch):
    for name, text in {'empty': '', 'broken': '{', 'one': '{"text": ""}',
                       'long': '{"text": "a ' + 'b' * 17 + '"}'}.items():
        (files / f'{name}.jsonl').write_text(text)
    for arguments, words in (
            (['--tasks=val,mmlu'], "'mmlu' is none of"),
            (['--tasks=text'], 'name the file with --data'),
            (['--num_fewshot=2'], 'go with lm_eval'),
            (['--lm_eval=x', '--include_path=nowhere'], 'no such folder'),
            (['--data=x'], 'goes with one task'),
            (['--tasks=text', f'--data={files}/none'], 'No such file'),
            (['--batch_size=0'], 'batch_size'), (['--dataset=nowhere'], 'nowhere is not prepared'),
            ([f'--output={files}/no/folder'], 'its folder is not there'),
            *(([f'--tasks={task}', f'--data={files}/{name}.jsonl'], words)
              for task, name, words in (
                ('hellaswag', 'lambada', 'lambada.jsonl, line 1: no HellaSwag'),
                ('lambada', 'hellaswag', 'line 1: no LAMBADA passage'),
                ('lambada', 'broken', 'broken.jsonl, line 1: not JSON'),
                ('lambada', 'empty', 'no questions there'),
                ('lambada', 'one', 'an empty context or answer'),
                ('lambada', 'long', 'more than the block_size of 16')))):
        assert words in fails(capsys, monkeypatch, evaluate.main, f'--out_dir={trained}',
                              '--device=cpu', *arguments), arguments
