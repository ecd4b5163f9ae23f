"""Conversations in the chat templates of pretrained models: what the batches hold and teach."""

import json
from itertools import groupby

import numpy as np
import pytest
from chat_templates import FORMS, IM, prompts_and_replies, save_form
from processes import fails
from sample_data import ask

import prepare
from plaingpt.core.dataset import open_dataset
from plaingpt.system.errors import UserError
from plaingpt.system.files import sha256_of

CONVERSATIONS = [ask(f'Add {i} and 2.', f'It is {i + 2}.', *rest) for i in range(20)
                 for rest in ((), (f'And to {i}?', f'Then {2 * i + 2}.', 'So?', f'So {i}.'))]
FAST = ('chatml', 'chatml, BOS im_start', 'chatml, no BOS', 'llama3', 'mistral', 'gemma', 'phi3',
        'zephyr')
SYSTEM = {'role': 'system', 'content': 'Be brief.'}


def command(form, conversations, folder):
    """Write conversations and a model with the template of a Form → what prepares them."""
    base = save_form(folder / 'base', form)
    (folder / 'a.jsonl').write_text(''.join(
        json.dumps({'messages': messages}) + '\n' for messages in conversations))
    return ['chat', f'{folder}/a.jsonl', f'--tokenizer={base}', '--val_fraction=0.1',
            f'--data_dir={folder}/d']


def prepared(form, conversations, folder):
    """Conversations in the template of a Form → their dataset."""
    prepare.main(command(form, conversations, folder))
    return open_dataset(folder / 'd')


@pytest.fixture(scope='module', params=[
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FORMS])
def name(request):
    return request.param


@pytest.fixture(scope='module')
def dataset(name, tmp_path_factory):
    return prepared(FORMS[name], CONVERSATIONS, tmp_path_factory.mktemp('form'))


def loaders(dataset, block_size):
    return [dataset.loader(split, block_size, 1) for split in ('train', 'val')]


def learned(dataset, block_size):
    """[(the text before a reply in its sequence, what of the reply is in the loss)], sorted"""
    tokenizer, pairs = dataset.tokenizer(), []
    for loader in loaders(dataset, block_size):
        starts = loader.sequence_starts(np.arange(loader.sequences_per_epoch))
        for idx, targets in zip(*(part.tolist() for part in loader._on_host(starts)), strict=True):
            end = 0
            for in_loss, run in groupby(targets, lambda target: target != -1):
                start, end = end, end + len(list(run))
                if in_loss:
                    pairs.append((tokenizer.decode(idx[:start + 1]),
                                  tokenizer.decode(targets[start:end])))
    return sorted(pairs, key=lambda pair: pair[1])


def expected(name, conversations=CONVERSATIONS):
    """[(the text of a conversation before a reply, the reply)], sorted"""
    pairs = [pair for messages in conversations
             for pair in prompts_and_replies(FORMS[name], messages)]
    return sorted(pairs, key=lambda pair: pair[1])


def test_a_conversation_is_counted_once(dataset):
    counts = [int(loader.describe().split()[0]) for loader in loaders(dataset, 300)]
    assert sum(counts) == len(CONVERSATIONS)


def test_each_reply_with_its_end_is_learned_once_after_its_conversation(name, dataset):
    pairs = learned(dataset, 700)
    assert [reply for _, reply in pairs] == [reply for _, reply in expected(name)]
    for (context, _), (prompt, _) in zip(pairs, expected(name), strict=True):
        assert context.endswith(prompt)


def test_a_long_conversation_is_split_where_the_user_speaks(name, dataset):
    turns = [pair for messages in CONVERSATIONS for i in range(0, len(messages), 2)
             for pair in prompts_and_replies(FORMS[name], messages[i:i + 2])]
    turns.sort(key=lambda pair: pair[1])
    block_size = 2 + max(len(dataset.tokenizer().ids_of(''.join(turn))) for turn in turns)
    assert ' 0 splits' not in loaders(dataset, block_size)[0].describe()
    pairs = learned(dataset, block_size)
    assert [reply for _, reply in pairs] == [reply for _, reply in turns]
    for (context, _), (turn, _) in zip(pairs, turns, strict=True):
        assert context.endswith(turn.removeprefix(FORMS[name].opening))


def test_a_prompt_is_what_the_model_was_trained_on(name, dataset):
    tokenizer = dataset.tokenizer()
    for messages in CONVERSATIONS[:2]:
        for i, (prompt, _) in enumerate(prompts_and_replies(FORMS[name], messages)):
            assert tokenizer.decode(tokenizer.encode_prompt(messages[:2 * i + 1])) == prompt


def test_a_reply_stops_at_the_token_that_was_learned(name, dataset):
    tokenizer = dataset.tokenizer()
    end = expected(name)[0][1][-4:]
    assert tokenizer.decode([tokenizer.end_of_turn]).endswith(end)
    assert tokenizer.end_of_turn in tokenizer.stop_ids
    assert tokenizer.stop_ids <= {tokenizer.bos_id, *tokenizer.ids.values()}  # none of text


def without_starts(folder):
    """Change a dataset to what version 1.0 wrote: it marked only what is in the loss, and put the
    end-of-text token between conversations, whatever else it stands for."""
    meta = json.loads((folder / 'meta.json').read_text())
    tokenizer = open_dataset(folder).tokenizer()
    for split, entry in meta['splits'].items():
        tokens, mask = folder / f'{split}.bin', folder / f'{split}_mask.bin'
        ids = np.fromfile(tokens, '<u2')
        ids[ids == tokenizer.bos_id] = tokenizer.base.end_of_text
        ids.tofile(tokens)
        mask.write_bytes(bytes(byte == 1 for byte in mask.read_bytes()))
        entry['files'][0] |= {'sha256': sha256_of(tokens), 'mask_sha256': sha256_of(mask)}
    (folder / 'meta.json').write_text(json.dumps(meta))
    return open_dataset(folder)


@pytest.mark.parametrize('name', ['chatml', 'llama3'])
def test_data_of_version_1_0_gives_the_same_batches(name, tmp_path):
    def batches(dataset, block_size):
        loader = dataset.loader('train', block_size, 1)
        return [part.tolist() for part in loader._on_host(loader.first_starts)]

    dataset = prepared(FORMS[name], CONVERSATIONS, tmp_path)
    expected = [batches(dataset, block_size) for block_size in (130, 300)]
    dataset = without_starts(tmp_path / 'd')
    assert [batches(dataset, block_size) for block_size in (130, 300)] == expected


def test_data_of_version_1_0_in_which_every_turn_is_a_conversation_is_prepared_again(tmp_path):
    prepared(FORMS['chatml, no BOS'], CONVERSATIONS, tmp_path)
    with pytest.raises(UserError, match='prepare'):
        without_starts(tmp_path / 'd').loader('train', 300, 1)
    dataset = prepared(FORMS['chatml, no BOS'], CONVERSATIONS, tmp_path)
    assert dataset.loader('train', 300, 1)


@pytest.mark.parametrize('form', [FORMS['gemma'], FORMS['merging'], FORMS['nemo']._replace(
    template="{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
             + FORMS['nemo'].template)], ids=['refuses', 'merges into the last', 'ignores'])
def test_a_conversation_that_a_template_cannot_express_is_refused_with_its_line(
        form, tmp_path, capsys, monkeypatch):
    conversations = [*CONVERSATIONS, [SYSTEM, *CONVERSATIONS[1]]]
    argv = command(form, conversations, tmp_path)
    assert f'a.jsonl, line {len(conversations)}: ' in fails(
        capsys, monkeypatch, prepare.main, *argv, '--strict')


def test_a_system_message_is_context(tmp_path):
    dataset = prepared(FORMS['default system'], [
        [SYSTEM, *ask(f'{i}?', 'It is 2.')] for i in range(20)], tmp_path)
    contexts, replies = zip(*learned(dataset, 150), strict=True)
    assert {*replies} == {'It is 2.<|im_end|>'}
    assert all(context.rpartition('system\nBe brief.<|im_end|>\n')[2].count('<|im_start|>') == 2
               for context in contexts)


@pytest.mark.parametrize('name', ['llama3', 'gemma', 'llama2'])
def test_a_reply_is_learned_as_a_template_strips_it(name, tmp_path):
    conversations = [ask(f' Add {i}? ', f'\n  It is {i + 2}.\n') for i in range(20)]
    dataset = prepared(FORMS[name], conversations, tmp_path)
    assert [reply for _, reply in learned(dataset, 150)] == [
        reply for _, reply in expected(name, conversations)]


@pytest.mark.parametrize('name', ['chatml', 'chatml, no BOS', 'llama3'])
def test_a_reply_longer_than_a_sequence_is_learned_whole(name, tmp_path):
    answers = [''.join(f'{i},{j};' for j in range(60)) for i in range(10)]
    dataset = prepared(FORMS[name], [ask('Count.', answer) for answer in answers], tmp_path)
    for block_size in (50, 51):
        text = ''.join(loader_text for loader_text in in_order(dataset, block_size))
        assert sorted(text.split(FORMS[name].reply[2:])) == ['', *sorted(answers)]


def in_order(dataset, block_size):
    """What is in the loss, in the order of the data."""
    for loader in loaders(dataset, block_size):
        targets = {}
        for start in loader.first_starts.tolist():
            _, [row] = loader._on_host(np.array([start]))
            for column, first, n in loader.layout(start):
                targets[first] = [i for i in row[column:column + n - 1].tolist() if i != -1]
        for _, ids in sorted(targets.items()):
            yield dataset.tokenizer().decode(ids)


def test_text_that_spells_control_tokens_starts_no_conversation(tmp_path):
    text = ''.join(IM) + 'user\n<|im_start|>'
    dataset = prepared(FORMS['chatml, BOS im_start'], [
        ask(f'{i}{text}', text) for i in range(20)], tmp_path)
    assert sum(len(loader.stream.document_starts) for loader in loaders(dataset, 300)) == 20
    assert {reply for _, reply in learned(dataset, 300)} == {text + '<|im_end|>'}
