"""plot.py --film: the page, and the page in a real browser: Debian's chromium and chromium-driver,
and the package selenium."""

import base64
import gzip
import json
import re
import shutil

import pytest
from helpers import TINY, fails, wait_until

import plot
import train
from plaingpt.training import film

HOSTILE = '</script><b id="bold">\u202ebold</b>\x1b[31m'


@pytest.fixture(scope='module')
def filmed(char_data, tmp_path_factory):
    """An out_dir with a film of seven instants, whose last sample would like to be markup."""
    out_dir = tmp_path_factory.mktemp('filmed') / 'out'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(film, 'FREE_S', 1e9)
        train.main([*TINY, '--film', f'--dataset={char_data}', f'--out_dir={out_dir}'])
    rows = [json.loads(line) for line in (out_dir / 'film.jsonl').read_text().splitlines()]
    rows[-1]['sample'] = rows[-1]['passages'][0][3][0] = HOSTILE
    (out_dir / 'film.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return out_dir


@pytest.fixture(scope='module')
def page(filmed):
    """The page of two runs."""
    other = filmed.with_name('other')
    shutil.copytree(filmed, other)
    (other / 'film/iter-00000006.safetensors').write_bytes(b'damaged')
    path = filmed.with_name('two.html')
    plot.main(['--film', str(filmed), str(other), f'--output={path}'])
    return path


def test_the_page_has_all_of_the_film_and_names_no_other_place(page, filmed):
    text = page.read_text()
    assert not re.search(r'https?://|src=|@import|url\(', text) and len(text) < 500_000
    [data] = re.findall(r'base64">([\w+/=]+)</script>', text)
    data = gzip.decompress(base64.b64decode(data))
    size = int.from_bytes(data[:4], 'little')
    one, two = json.loads(data[4:4 + size])
    assert [row['iter'] for row in one['instants']] == [0, 1, 2, 3, 4, 5, 6]
    assert one['instants'][-1]['sample'] == HOSTILE and len(one['val']) == 3
    assert 'maps' not in two['instants'][-1]  # where a file is damaged
    begin, L, H, T = two['instants'][-2]['maps']
    assert (L, H, T) == (2, 2, 16) and len(data) == 4 + size + begin + L * H * T * T


def test_mistakes_are_one_line(trained, filmed, capsys, monkeypatch):
    for argv, words in (((trained,), 'has no film: train with --film=True'),
                        ((filmed, '--live'), 'film=True goes with neither'),
                        ((filmed, '--output=a.png'), 'output=a.png: must end in .html'),
                        ((filmed, '--output=nowhere/a.html'), 'nowhere/a.html'),
                        (('nowhere',), 'name the out_dir of a run')):
        assert words in fails(capsys, monkeypatch, plot.main, '--film', *argv)


@pytest.fixture(scope='module')
def browser():
    selenium = pytest.importorskip('selenium.webdriver', reason='needs selenium')
    chromium, driver = shutil.which('chromium'), shutil.which('chromedriver')
    if not chromium or not driver:
        pytest.skip('needs chromium and chromedriver: apt-get install chromium chromium-driver')
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for switch in ('no-sandbox', 'headless', 'disable-gpu', 'disable-quic', 'no-first-run',
                   'disable-background-networking', 'disable-component-update', 'disable-sync',
                   'disable-dev-shm-usage', 'window-size=800,700'):
        options.add_argument(f'--{switch}')
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    browser = selenium.Chrome(options, selenium.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def shown(browser, page):
    browser.get(page.as_uri())
    wait_until(lambda: browser.find_elements('css selector', '.lens td'))
    yield browser
    assert not [entry for entry in browser.get_log('browser')
                if entry['level'] in ('WARNING', 'SEVERE')]


def text_of(browser, selector):
    return browser.find_element('css selector', selector).text


@pytest.mark.slow
def test_slider_keys_and_autoplay_move_through_all_runs(shown):
    body = shown.find_element('tag name', 'body')
    assert text_of(shown, '#at') == 'iteration 6' and len(
        shown.find_elements('css selector', '.run')) == 2
    body.send_keys('\ue012')  # the left arrow
    assert text_of(shown, '#at') == 'iteration 5'
    slider = shown.find_element('id', 'slider')
    slider.send_keys('\ue011')  # home
    assert text_of(shown, '#at') == 'iteration 0'
    assert slider.get_attribute('aria-valuetext') == 'iteration 0'
    first = text_of(shown, '.lens')
    body.send_keys(' ')
    assert text_of(shown, '#play') == '⏸ Pause'
    wait_until(lambda: text_of(shown, '#at') == 'iteration 6')
    wait_until(lambda: text_of(shown, '#play') == '▶ Play')
    assert text_of(shown, '.lens') != first


@pytest.mark.slow
def test_a_token_shows_what_was_likeliest_and_where_a_head_looks(shown):
    tokens = shown.find_elements('css selector', '.passage span')
    shown.execute_script('arguments[0].dispatchEvent(new PointerEvent("pointerover", '
                         '{bubbles: true}))', tokens[5])
    assert tokens[5].get_attribute('aria-selected') == 'true'
    assert len(shown.find_elements('css selector', '.run:first-child .guesses li')) == 5
    assert 'loss ' in tokens[5].get_attribute('aria-label')
    assert 'Block 1, head 1: at' in text_of(shown, '.sees')
    shown.find_elements('css selector', '.maps button')[3].click()
    assert 'Block 2, head 2: at' in text_of(shown, '.sees')
    assert 'token 6 of passage 1' in text_of(shown, '.sees')
    tokens[5].send_keys('\ue014')  # the right arrow
    assert shown.switch_to.active_element == tokens[6]
    assert text_of(shown, '#at') == 'iteration 6'  # the slider stays


@pytest.mark.slow
def test_what_a_model_wrote_is_text(shown):
    assert text_of(shown, '.sample').startswith('</script><b id="bold">')
    assert not shown.find_elements('id', 'bold')


@pytest.mark.slow
@pytest.mark.parametrize('width', [390, 1600])
def test_the_page_fits_its_width(shown, width):
    shown.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', dict(
        width=width, height=900, deviceScaleFactor=1, mobile=False))
    try:
        shown.refresh()
        wait_until(lambda: shown.find_elements('css selector', '.lens td'))
        assert shown.execute_script(
            'return innerWidth') == width and shown.execute_script(
            'return document.documentElement.scrollWidth <= innerWidth')
    finally:
        shown.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})
