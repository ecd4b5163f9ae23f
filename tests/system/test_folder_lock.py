"""One training run at a time in a folder."""

from helpers import fails

import train
from plaingpt.system.folder_lock import lock_output_dir


def test_a_folder_in_use_is_refused_and_may_be_evaluated(tiny, trained, capsys, monkeypatch):
    tiny = [*tiny, f'--out_dir={trained}', '--init_from=resume']
    before = (trained / 'metrics.jsonl').read_bytes()
    with lock_output_dir(trained):
        assert 'a run is writing there' in fails(capsys, monkeypatch, train.main, *tiny)
        train.main([*tiny, '--eval_only'])
    assert (trained / 'metrics.jsonl').read_bytes() == before
    train.main(tiny)  # and is free again
