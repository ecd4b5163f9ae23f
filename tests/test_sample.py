import gzip

import pytest
from runs import model_of

import sample
from configurator import load_config
from plaingpt.core import checkpoint as checkpoints


def text_of(capsys, out_dir, *extra):
    sample.main([f'--out_dir={out_dir}', '--device=cpu', '--num_samples=2', '--max_new_tokens=30',
                 *extra])
    head, *samples = capsys.readouterr().out.split('---------------\n')
    return head, samples


def test_a_sample_begins_with_its_start(trained, capsys):
    head, samples = text_of(capsys, trained, '--start=def main')
    parameters = model_of(checkpoints.find(trained, 'best')).num_parameters()
    assert f'{parameters:,}' in head
    assert len(samples) == 2
    for text in samples:
        assert text.startswith('def main')
        assert len(text) == len('def main') + 31


def test_a_start_is_read_from_a_file(trained, capsys, tmp_path):
    (tmp_path / 'prompt.txt.gz').write_bytes(gzip.compress(b'import sys\n'))
    _, samples = text_of(capsys, trained, f'--start=FILE:{tmp_path}/prompt.txt.gz')
    assert all(text.startswith('import sys\n') for text in samples)


def test_a_seed_repeats_the_text(trained, capsys):
    assert text_of(capsys, trained, '--seed=1') == text_of(capsys, trained, '--seed=1')
    assert text_of(capsys, trained, '--seed=1') != text_of(capsys, trained, '--seed=2')


def test_a_checkpoint_is_chosen_by_name(trained, capsys):
    assert 'iter-00000003' in text_of(capsys, trained, '--checkpoint=3')[0]
    assert 'iter-00000006' in text_of(capsys, trained, '--checkpoint=latest')[0]


def test_samples_do_not_depend_on_how_many_are_written_at_a_time(trained, capsys):
    texts = [text_of(capsys, trained, f'--batch_size={n}', '--num_samples=3') for n in (1, 2, 8)]
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0][1])) == 3


def test_a_stream_says_the_same(trained, capsys):
    assert text_of(capsys, trained, '--stream') == text_of(capsys, trained)


def test_a_stop_string_ends_a_sample(trained, capsys):
    _, free = text_of(capsys, trained, '--start=def')
    letter = free[0][10]
    _, stopped = text_of(capsys, trained, '--start=def', f'--stop=["{letter}", "unheard of"]')
    assert stopped[0] == free[0][:free[0].index(letter, 3)] + '\n'


TYPED = r'a\nb\tc\\n\x41\u00e9 \q \u12' + '\\'  # as a shell passes it on
READ = 'a\nb\tc\\n' + r'Aé \q \u12' + '\\'


def test_escapes_are_read_where_they_are_typed():
    config = load_config(sample.SampleConfig, [f'--start={TYPED}', f'--stop={TYPED}'])
    assert config.start == READ
    assert config.stop_strings() == [READ]


@pytest.mark.parametrize(('typed', 'decoded'), [
    (r'\theta', r'\t'), (r'C:\temp\new.txt', r'\t \n'), (r'ROMEO:\nWhat', r'\n'),
    (r'\\alpha', r'\\')])
def test_a_line_says_which_escapes_were_decoded(typed, decoded, capsys):
    load_config(sample.SampleConfig, [f'--start={typed}'])
    assert f'{decoded} in {typed}' in capsys.readouterr().err


def test_bytes_that_an_ascii_locale_leaves_undecoded_are_utf8():
    typed = 'größer'.encode().decode('ascii', 'surrogateescape')
    assert load_config(sample.SampleConfig, [f'--start={typed}']).start == 'größer'


def test_a_path_has_no_escapes():
    assert load_config(sample.SampleConfig, [r'--start=FILE:a\new']).start == r'FILE:a\new'


def test_a_json_list_has_its_own_escapes():
    config = load_config(sample.SampleConfig, [r'--stop=["\n", "\\n"]'])
    assert config.stop_strings() == ['\n', r'\n']


def test_a_config_file_has_the_escapes_of_python(tmp_path):
    (tmp_path / 'a.py').write_text(r"start = '\\textbf\n'; stop = r'\n'")
    config = load_config(sample.SampleConfig, [str(tmp_path / 'a.py')])
    assert config.start == '\\textbf\n'
    assert config.stop_strings() == [r'\n']
