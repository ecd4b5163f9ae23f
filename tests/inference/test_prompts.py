"""A prompt starts as the texts did that the model was trained on."""

import json
import random
import shutil

import numpy as np
import pytest
from processes import ROOT
from runs import TINY, lines
from sample_data import conversations, prepare_documents, write_chat

import plaingpt
import prepare
import sample
import serve
import train
from plaingpt.core import checkpoint as checkpoints
from plaingpt.core.dataset import open_dataset, open_dataset_spec
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.inference.text_generator import TextGenerator
from plaingpt.monitoring.sampling import sample_prompts

RUN = [*TINY, '--check=False', '--max_iters=1', '--n_layer=1']
SAMPLE = ['--device=cpu', '--dtype=float32', '--num_samples=1', '--max_new_tokens=9',
          '--temperature=0']
END = ByteTokenizer.end_of_text


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder with two runs and their datasets: names, which has one on each line, and text, one
    continuous text."""
    folder, rng = tmp_path_factory.mktemp('prompts'), random.Random(0)
    names = [''.join(rng.choices('aeimnor', k=6)) for _ in range(300)]
    (folder / 'names.txt').write_text('\n'.join(names))
    (folder / 'text.txt').write_text(', '.join(names))
    for name, options in ('names', ['--documents=line', '--tokenizer=bpe:280']), \
            ('text', ['--tokenizer=byte']):
        prepare.main(['text', f'{folder}/{name}.txt', f'--data_dir={folder}/data/{name}', *options])
        train.main([*RUN, f'--dataset={folder}/data/{name}', f'--out_dir={folder}/{name}'])
    return folder


@pytest.fixture
def prompts(monkeypatch):
    """The prompts from which any command generates, as lists of ids."""
    prompts, generate_texts = [], TextGenerator.generate_texts

    def noted(self, ids, *arguments):
        prompts.extend(ids)
        return generate_texts(self, ids, *arguments)
    monkeypatch.setattr(TextGenerator, 'generate_texts', noted)
    return prompts


def starts_of(folder, name, prompts, *options):
    """The ids from which sample.py generates."""
    sample.main([f'{folder}/{name}', *SAMPLE, *options])
    return prompts[-1]


def test_a_prompt_follows_the_token_that_starts_a_document(folder, prompts):
    tokenizer = open_dataset(folder / 'data/names').tokenizer()
    end, ids = tokenizer.end_of_text, tokenizer.encode('mar').tolist()
    assert starts_of(folder, 'names', prompts, '--start=mar') == [end, *ids]
    assert starts_of(folder, 'names', prompts, '--start=mar', '--stream') == [end, *ids]
    assert starts_of(folder, 'names', prompts, '--start=mar', '--continue_text') == ids


@pytest.mark.parametrize('options', [[], ['--start='], ['--start=\\n']])
def test_no_prompt_is_a_new_document(options, folder, prompts, capsys):
    end = open_dataset(folder / 'data/names').tokenizer().end_of_text
    assert starts_of(folder, 'names', prompts, *options) == [end]
    gpt = plaingpt.load(folder / 'names', device='cpu')
    text = gpt.generate('', max_new_tokens=9, temperature=0)
    assert capsys.readouterr().out.endswith(f'---------------\n{text}\n')


def test_a_continuous_text_has_no_start_of_a_document(folder, prompts):
    assert starts_of(folder, 'text', prompts, '--start=mar') == [*b'mar']
    assert starts_of(folder, 'text', prompts) == [*b'\n']


def test_a_line_break_continues_a_text(folder, prompts):
    ids = open_dataset(folder / 'data/names').tokenizer().encode('\n').tolist()
    assert starts_of(folder, 'names', prompts, '--continue_text') == ids


@pytest.mark.parametrize('prompt', ['', 'mar'])
@pytest.mark.parametrize('continues', [False, True])
def test_python_and_the_server_start_as_sample_py_does(prompt, continues, folder, prompts):
    starts_of(folder, 'names', prompts, f'--start={prompt}', f'--continue_text={continues}')
    gpt = plaingpt.load(folder / 'names', device='cpu')
    gpt.generate(prompt, max_new_tokens=1, continue_text=continues)
    body = json.dumps({'prompt': prompt, 'continue_text': continues})
    assert prompts == [serve.Completion(gpt, False, body).ids] * 2


def test_the_samples_of_a_run_start_as_sample_py_does(folder, prompts):
    for name in ('names', 'text'):
        dataset = open_dataset(folder / 'data' / name)
        assert sample_prompts(dataset, None)[0] == [starts_of(folder, name, prompts)]


def test_a_checkpoint_that_does_not_know_the_start_is_read_as_before(folder, prompts, tmp_path):
    shutil.copytree(folder / 'names', tmp_path / 'names')
    found = checkpoints.find('names')
    del found.state['document_start']
    checkpoints.write_state(found.path, found.state)
    tokenizer = open_dataset(folder / 'data/names').tokenizer()
    assert starts_of(tmp_path, 'names', prompts) == tokenizer.encode('\n').tolist()
    train.main(['--init_from=resume', '--out_dir=names', '--max_iters=2'])
    assert [line['iter'] for line in lines(tmp_path / 'names', 'loss')] == [1, 2]
    assert starts_of(tmp_path, 'names', prompts, '--checkpoint=2') == [tokenizer.end_of_text]


def test_a_run_of_1_0_samples_as_before(prompts):
    run = ROOT / 'tests/data/format_1/run'
    ids = plaingpt.load(run, device='cpu').tokenizer.encode('\n').tolist()
    sample.main([str(run), *SAMPLE])
    assert prompts == [ids]


# -----------------------------------------------------------------------------
# which id starts a document


@pytest.mark.parametrize(('ids', 'start'), [
    ([65, END, 66, 67], END), ([65, 66, END], END), ([65, 66, 67], None)])
def test_others_tokens_have_documents_where_they_have_the_end_of_a_text(ids, start, tmp_path):
    """nanoGPT has that token behind a document."""
    for split in ('train', 'val'):
        np.array(ids * 9, np.uint16).tofile(tmp_path / f'{split}.bin')
    (tmp_path / 'meta.json').write_text(json.dumps({
        'format_version': 1, 'dtype': 'uint16', 'vocab_size': 257, 'tokenizer': {'kind': 'byte'},
        'source': {}, 'splits': {split: {'files': [{
            'name': f'{split}.bin', 'tokens': len(ids) * 9, 'sha256': ''}]}
            for split in ('train', 'val')}}))
    assert open_dataset(tmp_path).document_start == start


def test_the_tokens_of_gpt2_have_documents_without_its_tokenizer(tmp_path):
    for split in ('train', 'val'):
        np.arange(0, 50257, 16, np.uint16).tofile(tmp_path / f'{split}.bin')
    assert open_dataset(tmp_path).document_start == 50256


def test_a_mixture_has_documents_where_one_of_its_parts_has(folder, tmp_path):
    prepare_documents(tmp_path / 'documents', ['mara', 'nora', 'rina', 'mira'])
    mixture = open_dataset_spec(f'{folder}/data/text:0.5,{tmp_path}/documents:0.5')
    assert mixture.document_start == END


def test_of_characters_a_line_break_ends_the_document_before(folder, tmp_path):
    prepare.main(['text', f'{folder}/names.txt', '--documents=line', '--tokenizer=char',
                  f'--data_dir={tmp_path}/chars'])
    dataset = open_dataset(tmp_path / 'chars')
    assert [dataset.document_start] == dataset.tokenizer().encode('\n').tolist()


def test_characters_of_one_text_and_conversations_have_no_such_id(char_data, tmp_path):
    assert open_dataset(char_data).document_start is None
    assert open_dataset(write_chat(tmp_path / 'chat', conversations(3))).document_start is None
