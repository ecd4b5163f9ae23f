"""Tokenizers and chat templates of others: our ids are those of their libraries, and come back."""

import json
from pathlib import Path

import pytest
from chat_templates import CHATML
from foreign_models import KINDS, STRANGE, THINKING, save_gpt2, save_model, save_tokenizer
from processes import fails
from sample_data import ask

import export
import prepare
import sample
from plaingpt.core.dataset import open_dataset
from plaingpt.data import tokenizers
from plaingpt.data.chat_tokenizer import PLAIN_TEMPLATES, as_chat
from plaingpt.data.foreign_tokenizer import read_tokenizer
from plaingpt.inference.hf_export import hf_tokenizer
from plaingpt.inference.open_weights import ModelChoice, load

TEXTS = [*STRANGE, ' ' * 5000, 'user\nassistant\n\nsystem']
CONVERSATIONS = [
    ask('Hi!', 'Hello.'), [{'role': 'system', 'content': 'Be brief.'}, *ask('a', 'b')],
    [*ask('a', 'b'), *ask(' c\n', 'd {{ x }} {% if %}')],
    ask('\n\n 1+1 = \t?\n', "2, 'of course' \"\\ 日本語")]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, tmp_path, text_file):
    texts = [text_file.read_text(encoding='utf-8')[:50_000], *TEXTS]
    save_model(tmp_path / kind, kind)
    save_tokenizer(tmp_path / kind, kind, texts)
    return tmp_path / kind


def opened(folder):
    return tokenizers.from_json(read_tokenizer(folder))


def in_transformers(folder):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder)


def test_text_is_encoded_as_by_the_tokenizers_library(folder):
    ours, theirs = opened(folder), in_transformers(folder)
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_vocabulary_has_the_rows_of_the_model(folder):
    ours = opened(folder)
    assert ours.vocab_size == 512
    assert ours.decode([505, 511]) == ''  # rows without a token
    (folder / 'config.json').unlink()
    assert opened(folder).vocab_size == len(in_transformers(folder))


def test_special_tokens_are_those_of_the_files(folder, kind):
    ours = opened(folder)
    opener, end = {'llama3': ('<|begin_of_text|>', '<|eot_id|>')}.get(
        kind, ('<|endoftext|>', '<|im_end|>'))
    assert ours.end_of_text == ours.control_tokens[opener]
    assert ours.stop_ids == {ours.control_tokens[opener], ours.control_tokens[end]}


def test_conversations_are_encoded_by_the_template_of_the_model(folder, kind, capsys):
    chat = tokenizers.from_json(as_chat(read_tokenizer(folder), folder))
    assert not capsys.readouterr().err
    theirs = in_transformers(folder)
    for messages in CONVERSATIONS:
        ids, loss_mask = chat.encode_conversation(messages)
        begin = 0 if kind == 'llama3' else 1  # what opens a document is none of their form
        wanted = theirs.apply_chat_template(messages, return_dict=True)['input_ids']
        assert ids[begin:].tolist() == wanted
        answers = [message['content'].strip() if kind == 'llama3' else message['content']
                   for message in messages if message['role'] == 'assistant']
        end = '<|eot_id|>' if kind == 'llama3' else '<|im_end|>'
        thought = '<think>\n\n</think>\n\n' if kind == 'qwen' else ''
        assert chat.decode(ids[loss_mask]) == ''.join(thought + text + end for text in answers)
        prompt = chat.encode_prompt(messages[:-1]).tolist()
        assert prompt == theirs.apply_chat_template(messages[:-1], return_dict=True,
                                                    add_generation_prompt=True)['input_ids']


def test_text_that_spells_a_control_token_stays_text(folder, kind):
    ours = opened(folder)
    names = KINDS[kind][0]
    for name in names:
        ids = ours.encode(f'a{name}b').tolist()
        assert not ours.special_ids & {*ids}
        assert ours.decode(ids) == f'a{name}b'
    chat = tokenizers.from_json(as_chat(read_tokenizer(folder), folder))
    text = f'a{"".join(names)}b'
    ids, loss_mask = chat.encode_conversation(ask(text, text))
    plain, _ = chat.encode_conversation(ask('x', 'x'))
    count = [sum(i in chat.base.special_ids for i in each.tolist()) for each in (ids, plain)]
    assert count[0] == count[1]
    assert text in chat.decode(ids[loss_mask])


CHANGING = THINKING.replace("* (message", "* (loop.last and message")  # earlier turns lose it


@pytest.mark.parametrize('template', [
    '{% for', '{{ messages[99].content }}', CHANGING,
    CHATML.partition('{% if add')[0],  # without a header for the reply
    CHATML.replace("'<|im_end|>' + '\n'", "'\n'"),  # a reply has no end
    ''.join(CHATML.split("'<|im_end|>' + ")) + '{{ eos_token }}',
    "{{ cycler.__init__.__globals__.os.system('touch hacked') }}"])
def test_a_template_that_cannot_be_used_is_replaced(template, tmp_path, capsys):
    save_tokenizer(tmp_path, 'smollm2', TEXTS)
    (tmp_path / 'chat_template.jinja').write_text(template)
    chat = tokenizers.from_json(as_chat(read_tokenizer(tmp_path), tmp_path))
    assert chat.template == PLAIN_TEMPLATES['chatml']
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not Path('hacked').exists()


# -----------------------------------------------------------------------------
# vocab.json and merges.txt


OLD = {'<|endoftext|>': 0, '<s>': 1}  # tokens that training adds to the vocabulary
BESIDE = {  # files beside vocab.json and merges.txt
    'nothing': {},
    'names': {'special_tokens_map.json': {'bos_token': '<s>', 'eos_token': {
        'content': '<s>', 'lstrip': False, 'rstrip': False, 'normalized': True}}},
    'config': {'tokenizer_config.json': {'tokenizer_class': 'GPT2Tokenizer', 'unk_token': '[U]',
                                         'add_prefix_space': False, 'model_max_length': 64}},
    'added': {'added_tokens.json': {'<|user|>': 400, '<plain>': 401},
              'special_tokens_map.json': {'additional_special_tokens': ['<|user|>']}},
    'decoder': {'tokenizer_config.json': {'added_tokens_decoder': {'400': {
        'content': '<|user|>', 'lstrip': False, 'rstrip': False, 'normalized': False,
        'single_word': False, 'special': True}}}}}


def save_vocabulary(folder, beside='nothing', model_type='gpt2', vocab_size=512):
    """The tokenizer of a GPT-2 in another language, as it was published before tokenizer.json."""
    from tokenizers import ByteLevelBPETokenizer
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(['Où êtes-vous ? À Genève, où il pleut. ' * 9, *TEXTS], 400,
                             special_tokens=[*OLD], show_progress=False)
    folder.mkdir(exist_ok=True)
    made.save_model(str(folder))
    files = {'config.json': {'model_type': model_type, 'vocab_size': vocab_size}, **BESIDE[beside]}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize('beside', BESIDE)
def test_vocab_and_merges_of_a_gpt2_are_read_as_in_transformers(beside, tmp_path):
    folder = save_vocabulary(tmp_path / 'old', beside)
    ours, theirs = opened(folder), in_transformers(folder)
    for text in [*TEXTS, 'Où êtes-vous']:
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text
    assert len(ours.encode('Où êtes-vous')) < 8
    added = {'added': {'<|user|>': 400}, 'decoder': {'<|user|>': 400}, 'names': {'<s>': 1}}
    assert ours.control_tokens == {'<|endoftext|>': 0, **added.get(beside, {})}
    assert ours.stop_ids == {0, 1} if beside == 'names' else {0}
    if beside == 'added':
        assert ours.encode('a<plain>').tolist()[-1] == 401


def test_a_description_of_vocab_and_merges_is_the_same_each_time(tmp_path):
    folder = save_vocabulary(tmp_path / 'old')
    assert read_tokenizer(folder) == read_tokenizer(folder)
    ids = json.loads(read_tokenizer(folder)['files']['tokenizer.json'])['model']['vocab'].values()
    assert [*ids] == sorted(ids)  # the package gives them in an order that differs each time


@pytest.mark.slow
def test_vocab_and_merges_of_gpt2_itself_are_gpt2(tmp_path, real_gpt2):
    model = hf_tokenizer(tokenizers.GPT2Tokenizer())['model']
    (tmp_path / 'vocab.json').write_text(json.dumps(model['vocab']))
    (tmp_path / 'merges.txt').write_text('\n'.join(['#version: 0.2', *model['merges']]))
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2", "vocab_size": 50257}')
    description = read_tokenizer(tmp_path)
    assert tokenizers.vocabulary_of(description) == {'kind': 'gpt2'}
    theirs, ours = (tokenizers.from_json(each) for each in (description, {'kind': 'gpt2'}))
    for text in TEXTS:
        assert theirs.encode(text).tolist() == ours.encode(text).tolist()


def put(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


UNKNOWN = {  # files → what the error names
    'sentencepiece': ({'tokenizer.model': 'x'}, 'tokenizer.model'),
    'T5': ({'spiece.model': 'x'}, 'spiece.model'), 'BERT': ({'vocab.txt': '[PAD]'}, 'vocab.txt'),
    'no merges': ({'vocab.json': {'a': 0}}, 'vocab.json'),
    'only a configuration': ({'tokenizer_config.json': {}}, 'tokenizer_config.json'),
    'tiktoken': ({'qwen.tiktoken': ''}, 'qwen.tiktoken'),
    'RoBERTa': ({'vocab.json': {'a': 0}, 'merges.txt': '',
                 'tokenizer_config.json': {'tokenizer_class': 'RobertaTokenizer'}}, 'merges.txt')}


@pytest.mark.parametrize('kind', UNKNOWN)
def test_a_tokenizer_of_another_kind_is_not_taken_for_gpt2s(kind, tmp_path, capsys, monkeypatch):
    files, name = UNKNOWN[kind]
    save_gpt2(Path('in'), vocab_size=50257, n_positions=8, n_layer=1, n_head=1, n_embd=4)
    Path('in/tokenizer.json').unlink(missing_ok=True)
    Path('in/tokenizer_config.json').unlink(missing_ok=True)
    for file, content in files.items():
        put(Path('in'), file, content)
    line = fails(capsys, monkeypatch, sample.main, '--init_from=in', '--device=cpu')
    assert name in line and '--tokenizer' in line
    line = fails(capsys, monkeypatch, prepare.main, 'text', __file__, '--tokenizer=in')
    assert name in line


def test_a_qwen_with_vocab_and_merges_is_not_taken_for_a_gpt2(tmp_path):
    assert read_tokenizer(save_vocabulary(tmp_path / 'old', model_type='qwen2')) is None


def test_a_model_without_a_tokenizer_says_that_gpt2s_is_used(tmp_path, capsys):
    save_gpt2(tmp_path, vocab_size=50257, n_positions=8, n_layer=1, n_head=1, n_embd=4)
    for path in tmp_path.glob('tokenizer*'):
        path.unlink()
    _, tokenizer, _ = load(ModelChoice(str(tmp_path)))
    assert tokenizer.to_json() == {'kind': 'gpt2'}
    [line] = capsys.readouterr().out.splitlines()
    assert '--tokenizer' in line


BROKEN = {
    'a merge without its token': {'merges.txt': 'Z Z Z'}, 'no object': {'vocab.json': '[]'},
    'not a byte-level BPE': {'vocab.json': {'日': 0, 'a</w>': 1}, 'merges.txt': ''},
    'two tokens with an id': {'added_tokens.json': {'<|user|>': 5}},
    'a token with two ids': {'added_tokens.json': {'a': 400}},
    'more tokens than the model': {'added_tokens.json': {'<|user|>': 600}}}


@pytest.mark.parametrize('name', BROKEN)
def test_a_broken_vocabulary_is_refused_in_a_line(name, tmp_path, capsys, monkeypatch):
    folder = save_vocabulary(tmp_path / 'old')
    for file, content in BROKEN[name].items():
        put(folder, file, content)
    assert 'old' in fails(capsys, monkeypatch, prepare.main, 'text', __file__,
                          f'--tokenizer={folder}', '--data_dir=d')


# -----------------------------------------------------------------------------
# datasets and exports


def test_a_dataset_knows_the_bytes_of_its_tokens(folder, text_file, tmp_path):
    prepare.main(['text', f'--input={text_file}', f'--tokenizer={folder}', '--data_dir=data/x'])
    dataset = open_dataset(tmp_path / 'data/x')
    ours, stream = dataset.tokenizer(), dataset.split('val')
    ids = stream.read(0, len(stream))
    text = ours.decode(ids)
    assert text_file.read_text(encoding='utf-8').endswith(text)
    assert dataset.bytes_per_token('val') == pytest.approx(len(text.encode()) / len(ids))
    assert dataset.token_bytes('val')[ids].sum() == len(text.encode())


@pytest.mark.parametrize('normalizer', ['Lowercase', 'NFC'])
def test_a_tokenizer_that_does_not_give_the_text_back_is_refused(
        normalizer, tmp_path, capsys, monkeypatch):
    save_tokenizer(tmp_path / 'in', 'smollm2', TEXTS)
    path = tmp_path / 'in/tokenizer.json'
    made = json.loads(path.read_text())
    path.write_text(json.dumps({**made, 'normalizer': {'type': normalizer}}))
    for name, row in (('text', {'text': 'Cafe\u0301  Привет'}),
                      ('chat', {'prompt': 'Cafe\u0301  Привет', 'completion': 'so'})):
        Path('a.jsonl').write_text(20 * (json.dumps(row) + '\n'))
        line = fails(capsys, monkeypatch, prepare.main, name, 'a.jsonl', '--tokenizer=in',
                     '--data_dir=d')
        assert '--tokenizer' in line
        assert not Path('d').exists()


def test_an_export_has_the_files_that_came_in(folder, tmp_path):
    export.main([f'--init_from={folder}', f'--dest={tmp_path}/out'])
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        assert (tmp_path / 'out' / name).read_bytes() == (folder / name).read_bytes()
    _, tokenizer, *_ = load(ModelChoice(str(tmp_path / 'out')))
    theirs = in_transformers(tmp_path / 'out')  # the template has a file of its own there
    assert theirs.apply_chat_template(CONVERSATIONS[0][:-1], return_dict=True,
                                      add_generation_prompt=True)['input_ids'] \
        == tokenizer.encode_prompt(CONVERSATIONS[0][:-1]).tolist()
