"""Tokenizers and chat templates of others: our ids are those of their libraries, and come back."""

import json
import shutil

import numpy as np
import pytest
from foreign_models import KINDS, STRANGE, THINKING, save_model, save_tokenizer
from processes import fails
from sample_data import ask

import evaluate
import export
import prepare
from plaingpt.data import tokenizers
from plaingpt.data.chat_tokenizer import PLAIN_TEMPLATES, ChatTokenizer, as_chat
from plaingpt.data.dataset import open_dataset
from plaingpt.data.foreign_tokenizer import read_tokenizer
from plaingpt.inference.text_generator import StreamDecoder
from plaingpt.system.errors import UserError
from plaingpt.training.open_weights import ModelChoice, load

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


def test_ids_are_those_of_the_packages_and_text_comes_back(folder):
    ours, theirs = opened(folder), in_transformers(folder)
    assert ours.vocab_size == 512 > len(theirs)
    (folder / 'config.json').unlink()  # without a model, as many as there are
    assert opened(folder).vocab_size == len(theirs)
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids)
        shown = []
        decoder = StreamDecoder(ours, show=shown.append)
        for i in ids:
            decoder.add(i)
        decoder.finish()
        assert ''.join(shown) == ours.decode(ids)
    assert ours.decode([505, 511]) == ''  # rows of the model for no token


def test_documents_begin_and_texts_end_with_the_tokens_that_the_files_name(folder, kind):
    ours = opened(folder)
    opener, end = {'llama3': ('<|begin_of_text|>', '<|eot_id|>')}.get(
        kind, ('<|endoftext|>', '<|im_end|>'))
    assert ours.end_of_text == ours.control_ids[opener]
    assert ours.ends == {ours.control_ids[opener], ours.control_ids[end]}


def test_conversations_are_those_of_their_template(folder, kind, capsys):
    chat = tokenizers.from_json(as_chat(read_tokenizer(folder), folder))
    assert chat.vocab_size == 512 and not capsys.readouterr().err
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
    for name in KINDS[kind][0]:
        ids = ours.encode(f'a{name}b')
        assert not ours.controls & {*ids.tolist()} and ours.decode(ids) == f'a{name}b'
        assert ours.decode([ours.control_ids[name]]) == name
    chat = tokenizers.from_json(as_chat(read_tokenizer(folder), folder))
    text = f'a{"".join(KINDS[kind][0])}\ue000b'
    ids, loss_mask = chat.encode_conversation(ask(text, text))
    plain, _ = chat.encode_conversation(ask('x', 'x'))
    count = [sum(i in chat.base.controls for i in each.tolist()) for each in (ids, plain)]
    assert count[0] == count[1] and text in chat.decode(ids[loss_mask])


CHANGING = THINKING.replace("* (message", "* (loop.last and message")  # earlier turns lose it


@pytest.mark.parametrize('template', [
    '{{ 1 / 0 }}', '{% for', '{{ messages[99].content }}', 'plain text', CHANGING,
    '{{ raise_exception("no") }}',
    "{{ cycler.__init__.__globals__.os.system('touch hacked') }}"])
def test_a_template_that_cannot_be_used_gives_way_in_a_line_and_reaches_no_python(
        tmp_path, template, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path, 'smollm2', TEXTS)
    (tmp_path / 'chat_template.jinja').write_text(template)
    chat = tokenizers.from_json(as_chat(read_tokenizer(tmp_path), tmp_path))
    assert chat.template == PLAIN_TEMPLATES['chatml']
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / 'hacked').exists()


def test_a_template_of_unknown_control_tokens_leaves_a_model_of_text(tmp_path, capsys):
    save_tokenizer(tmp_path, 'smollm2', TEXTS)
    text = (tmp_path / 'tokenizer.json').read_text()
    (tmp_path / 'tokenizer.json').write_text(text.replace('<|im_', '<|turn_'))
    description = as_chat(read_tokenizer(tmp_path), tmp_path)
    assert description['kind'] == 'foreign' and 'a model of text' in capsys.readouterr().err
    ours = ChatTokenizer(tokenizers.from_json(description))  # for conversations it gets our form
    assert ours.is_ours() and ours.vocab_size == ours.base.vocab_size + 5


def test_a_dataset_of_their_tokens_says_how_many_bytes_they_have(
        folder, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare.main(['text', f'--input={text_file}', f'--tokenizer={folder}', '--data_dir=data/x'])
    dataset = open_dataset(tmp_path / 'data/x')
    ours, stream = dataset.tokenizer(), dataset.split('val')
    ids = stream.read(0, len(stream))
    text = ours.decode(ids)
    assert text_file.read_text(encoding='utf-8').endswith(text)
    assert dataset.bytes_per_token('val') == pytest.approx(len(text.encode()) / len(ids))
    assert dataset.token_bytes('val')[ids].sum() == len(text.encode())
    assert dataset.vocab_size == 512 and np.array_equal(ours.encode(text), ids)


def change_tokenizer(folder, change, tmp_path):
    """A copy of a model's folder, whose tokenizer loses something of a text."""
    copy = shutil.copytree(folder, tmp_path / 'copy')
    made = json.loads((copy / 'tokenizer.json').read_text())
    if change == 'few bytes':
        for token in [token for token in made['model']['vocab'] if 'Ð' in token or 'Ñ' in token]:
            del made['model']['vocab'][token]
        made['model']['merges'] = [pair for pair in made['model']['merges'] if not any(
            char in part for part in pair for char in 'ÐÑ')]
    elif change == 'whitespace':
        made['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': [
            {'type': 'WhitespaceSplit'}, made['pre_tokenizer']]}
    else:
        made['normalizer'] = {'type': change}
    (copy / 'tokenizer.json').write_text(json.dumps(made))
    return copy


@pytest.mark.parametrize('kind', ['smollm2'])
@pytest.mark.parametrize('change', ['Lowercase', 'NFC', 'whitespace', 'few bytes'])
def test_a_tokenizer_that_does_not_give_the_text_back_is_refused(
        change, folder, tmp_path, capsys, monkeypatch):
    copy = change_tokenizer(folder, change, tmp_path)
    for name, row in (('text', {'text': 'Cafe\u0301  Привет'}),
                      ('chat', {'prompt': 'Cafe\u0301  Привет', 'completion': 'so'})):
        (tmp_path / 'a.jsonl').write_text(20 * (json.dumps(row) + '\n'))
        line = fails(capsys, monkeypatch, prepare.main, name, f'{tmp_path}/a.jsonl',
                     f'--tokenizer={copy}', f'--data_dir={tmp_path}/d')
        assert '--tokenizer' in line and not (tmp_path / 'd').exists()


def test_an_export_has_the_files_that_came_in(folder, tmp_path):
    export.main([f'--init_from={folder}', f'--dest={tmp_path}/out'])
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        assert (tmp_path / 'out' / name).read_bytes() == (folder / name).read_bytes()
    _, tokenizer, *_ = load(ModelChoice(str(tmp_path / 'out')))
    theirs = in_transformers(tmp_path / 'out')  # the template has a file of its own there
    assert theirs.apply_chat_template(CONVERSATIONS[0][:-1], return_dict=True,
                                      add_generation_prompt=True)['input_ids'] \
        == tokenizer.encode_prompt(CONVERSATIONS[0][:-1]).tolist()


def test_an_export_is_evaluated_on_the_data_of_its_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / 'in', 'smollm2')
    save_tokenizer(tmp_path / 'in', 'smollm2', TEXTS)
    with open('asked.jsonl', 'w') as f:
        f.writelines(json.dumps({'messages': ask('a', str(i))}) + '\n' for i in range(20))
    prepare.main(['chat', '--input=asked.jsonl', '--tokenizer=in', '--val_fraction=0.25'])
    export.main(['--init_from=in', '--dest=out'])
    ends = {'eos_token_id': [0, 2]}  # as an export adds those of its answers
    (tmp_path / 'out/generation_config.json').write_text(json.dumps(ends))
    evaluate.main(['--init_from=out', '--dataset=chat', '--device=cpu'])
    assert 'val of data/chat, the answers: loss' in capsys.readouterr().out


@pytest.mark.parametrize('text', ['', '{', 'null', '{"decoder": null, "model": null}'])
def test_a_tokenizer_that_cannot_be_used_is_refused_in_a_line(text, tmp_path):
    save_model(tmp_path, 'smollm2')
    save_tokenizer(tmp_path, 'smollm2', TEXTS)
    (tmp_path / 'tokenizer.json').write_text(text)
    with pytest.raises(UserError) as e:
        load(ModelChoice(str(tmp_path)))
    assert len(str(e.value).splitlines()) == 1
