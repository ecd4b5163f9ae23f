"""Conversations packed into sequences: the contract is that of every loader, and of the mask."""

import json

import numpy as np
import pytest
import torch
from sample_data import CHAT, ask, write_chat

from plaingpt.core.dataset import open_dataset
from plaingpt.data.inspection import find_damage
from plaingpt.system.errors import UserError

CONVERSATION, USER, ASSISTANT, END = CHAT.bos_id, *[CHAT.roles[r] for r in (
    'user', 'assistant')], CHAT.end_of_turn


def random_conversations(n, longest, seed=0):
    rng = np.random.default_rng(seed)
    return [ask(*(f'{i}:' + 'x' * int(rng.integers(0, longest)) for _ in range(2 * turns)))
            for i, turns in enumerate(rng.integers(1, 4, n))]


def loader_of(folder, block_size=64, batch_size=2, split='train', **settings):
    return open_dataset(folder).loader(split, block_size, batch_size, **settings)


def rows_of(loader):
    """(idx, targets) of all sequences of the loader's first epoch."""
    starts = loader.sequence_starts(np.arange(loader.sequences_per_epoch))
    return [part.tolist() for part in loader._on_host(starts)]


def test_a_sequence_holds_whole_conversations_then_padding_that_is_no_target(tmp_path):
    folder = write_chat(tmp_path / 'chat', [ask('ab', 'c'), ask('d', 'ef')])
    [idx], [targets] = rows_of(loader_of(folder, block_size=20))
    a, b, c, d, e, f = b'abcdef'
    assert idx == [CONVERSATION, USER, a, b, END, ASSISTANT, c, END,
                   CONVERSATION, USER, d, END, ASSISTANT, e, f, END,
                   CONVERSATION, END, END, END]
    assert targets == [-1, -1, -1, -1, -1, c, END, -1,
                       -1, -1, -1, -1, e, f, END, -1, -1, -1, -1, -1]


CONVERSATIONS = random_conversations(80, 8)


@pytest.fixture
def packed(tmp_path):
    """The loader of conversations that all fit into a sequence."""
    return loader_of(write_chat(tmp_path / 'chat', CONVERSATIONS))


def test_conversations_that_fit_are_never_split(packed):
    idx, _ = rows_of(packed)
    text = [i for row in idx for i in [*row, CONVERSATION]]
    for messages in CONVERSATIONS:
        ids = CHAT.encode_conversation(messages)[0].tolist()
        places = [k for k in range(len(text)) if text[k:k + len(ids) - 1] == ids[:-1]]
        assert len(places) == 1  # its last token may be a target only


def test_each_token_of_the_answers_is_a_target_once(packed):
    _, targets = rows_of(packed)
    in_loss = sum(CHAT.encode_conversation(messages)[1].sum() for messages in CONVERSATIONS)
    assert sum(t != -1 for row in targets for t in row) == in_loss
    assert packed.num_targets.sum() == in_loss


@pytest.fixture
def split(tmp_path):
    """The loader of a conversation longer than a sequence, with a turn that is longer, too."""
    folder = write_chat(tmp_path / 'chat', [ask('a' * 5, 'b' * 5, 'c' * 5, 'd' * 5, 'e' * 40, 'f')])
    return loader_of(folder, block_size=19, batch_size=1)


def test_a_long_conversation_is_split_where_the_user_speaks(split):
    firsts = {tuple(row[:7]) for row in rows_of(split)[0]}
    a, c, e, f = b'acef'
    assert (CONVERSATION, USER, a, a, a, a, a) in firsts
    assert (CONVERSATION, USER, c, c, c, c, c) in firsts
    assert (CONVERSATION, e, e, e, END, ASSISTANT, f) in firsts  # within a turn that is too long


def test_splitting_a_conversation_keeps_every_answer(split):
    _, targets = rows_of(split)
    assert sorted(t for row in targets for t in row if t != -1) == sorted(
        [*b'bbbbb', END, *b'ddddd', END, ord('f'), END])


def test_each_epoch_has_each_sequence_once(packed):
    n = packed.sequences_per_epoch
    for epoch in range(2):
        starts = packed.sequence_starts(epoch * n + np.arange(n))
        assert sorted(starts) == packed.first_starts.tolist()


def test_processes_share_the_steps_of_one(tmp_path):
    folder = write_chat(tmp_path / 'chat', random_conversations(90, 12))
    whole = loader_of(folder, batch_size=6, seed=3)
    for size in (1, 2, 3):
        shares = [loader_of(folder, batch_size=1, micro_steps=6 // size, rank=rank,
                            world_size=size, seed=3) for rank in range(size)]
        for step in (0, 5, 40):
            idx, targets, weight = whole.train_batch(step, 0)
            parts = [shares[rank].train_batch(step, micro)
                     for micro in range(6 // size) for rank in range(size)]
            assert weight == 1
            assert torch.equal(torch.cat([part[0] for part in parts]), idx)
            assert torch.equal(torch.cat([part[1] for part in parts]), targets)
            for _, mine, weight in parts:  # what its mean has to be multiplied with
                assert weight == pytest.approx(
                    size * (mine != -1).sum().item() / (targets != -1).sum().item())


def test_a_damaged_loss_mask_is_named(packed, tmp_path):
    mask = tmp_path / 'chat/train_mask.bin'
    mask.write_bytes(bytes(mask.stat().st_size))
    with pytest.raises(UserError, match=r'train_mask\.bin'):
        loader_of(tmp_path / 'chat')
    assert 'train_mask.bin' in find_damage(open_dataset(tmp_path / 'chat'))[0]
    mask.unlink()
    with pytest.raises(UserError, match=r'train_mask\.bin'):
        loader_of(tmp_path / 'chat')


def test_another_loss_mask_is_other_data(packed, tmp_path):
    before = open_dataset(tmp_path / 'chat').identity('train')
    path = tmp_path / 'chat/meta.json'
    meta = json.loads(path.read_text())
    meta['splits']['train']['files'][0]['mask_sha256'] = 64 * '0'
    path.write_text(json.dumps(meta))
    assert open_dataset(tmp_path / 'chat').identity('train') != before
