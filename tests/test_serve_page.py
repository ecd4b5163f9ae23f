"""The page in a real browser: Debian's chromium and chromium-driver, and the package selenium."""

import re
import shutil
from contextlib import contextmanager
from itertools import product

import pytest
from chat_model import ANSWERS
from helpers import wait_until
from serving_process import serving
from test_docs import after_readme, follow  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow


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


def texts(browser, kind):
    return [box.text for box in browser.find_elements('css selector', f'.{kind}')]


def say(browser, text):
    browser.find_element('id', 'input').send_keys(text + '\n')


def loaded(browser, server, temperature='0'):
    browser.get(server.url)
    wait_until(lambda: 'reads' in browser.find_element('id', 'about').text)
    browser.execute_script('document.getElementById("temperature").value = arguments[0]',
                           temperature)


def answered(browser):
    wait_until(lambda: browser.find_element('id', 'send').is_displayed())


def test_an_answer_is_streamed_to_the_page_as_text(browser, chat_server):
    loaded(browser, chat_server)
    assert browser.find_element('id', 'name').text == 'tuned'
    browser.execute_script('''
        window.seen = new Set();
        new MutationObserver(() => seen.add(document.querySelector('.assistant')?.textContent))
            .observe(document.getElementById('log'), {childList: true, subtree: true});''')
    say(browser, 'long')
    answered(browser)
    assert texts(browser, 'assistant') == [ANSWERS['long']]
    assert len(browser.execute_script('return [...seen]')) > 5  # it grew before the eyes
    say(browser, '<i>hi</i>')
    answered(browser)
    say(browser, 'html')
    answered(browser)
    assert texts(browser, 'user') == ['long', '<i>hi</i>', 'html']
    browser.find_element('id', 'clear').click()
    say(browser, 'html')
    answered(browser)
    answer, = texts(browser, 'assistant')
    assert answer.startswith('<b id="bold">b</b>')
    assert not browser.find_elements('id', 'bold') and not browser.find_elements('tag name', 'i')
    assert not [entry for entry in browser.get_log('browser')  # and nothing the policy refused
                if entry['level'] in ('WARNING', 'SEVERE')]


def test_an_empty_page_has_a_hint_and_the_size_of_the_model_in_words(browser, chat_server):
    loaded(browser, chat_server)
    hint, about = browser.find_element('id', 'hint'), browser.find_element('id', 'about')
    assert hint.text.startswith('Ask something. Enter sends')
    assert re.fullmatch(r'a model of [0-9.]+ thousand parameters that reads 96 tokens', about.text)
    say(browser, 'hi')
    answered(browser)
    assert not hint.is_displayed()
    browser.find_element('id', 'clear').click()
    assert hint.is_displayed() and browser.switch_to.active_element.get_attribute('id') == 'input'


def test_what_does_not_fit_any_more_is_said(browser, chat_server):
    loaded(browser, chat_server)
    for text in ('x' * 20, 'hi', 'y' * 20, 'hi', 'z' * 20):
        say(browser, text)
        answered(browser)
    assert any('does not see the' in note for note in texts(browser, 'note'))


def test_the_page_fits_a_phone(browser, chat_server):
    browser.set_window_size(390, 700)
    try:
        loaded(browser, chat_server)
        assert browser.find_element('id', 'input').get_attribute('placeholder')  # a hint
        assert browser.execute_script('return innerWidth') <= 390
        browser.find_element('css selector', 'summary').click()
        say(browser, 'x' * 70)
        answered(browser)
        wide = browser.execute_script("""
            return [...document.querySelectorAll('body *')].map(each => each.id).filter(id =>
                id && document.getElementById(id).getBoundingClientRect().right > innerWidth)""")
        assert not wide
        assert browser.execute_script('return document.documentElement.scrollWidth <= innerWidth')
    finally:
        browser.set_window_size(800, 700)


@contextmanager
def long_answer(browser, trained, tmp_path):
    """A server whose answer has begun to show, and does not end by itself."""
    with serving(tmp_path, trained, max_tokens=10**9) as server:
        loaded(browser, server)
        browser.execute_script('document.getElementById("tokens").value = 1e9')
        say(browser, 'def')
        wait_until(lambda: len((texts(browser, 'assistant') or [''])[0]) > 20)
        yield server


@pytest.mark.parametrize('how', ['button', 'Escape'])
def test_an_answer_can_be_stopped(browser, trained, tmp_path, how):
    with long_answer(browser, trained, tmp_path) as server:
        assert 'not tuned to chat' in browser.find_element('id', 'about').text
        if how == 'button':
            browser.find_element('id', 'stop').click()
        else:
            browser.find_element('id', 'input').send_keys('\ue00c')  # Escape
        answered(browser)
        assert texts(browser, 'note') == ['(stopped)'] and not texts(browser, 'error')
        wait_until(lambda: 'completion: ' in server.log.read_text())


def test_the_page_says_that_the_server_has_stopped(browser, trained, tmp_path):
    with long_answer(browser, trained, tmp_path) as server:
        server.stop()
        answered(browser)
        assert texts(browser, 'error') == ['the server stops']
        say(browser, 'more')
        answered(browser)
        assert 'The server does not answer' in texts(browser, 'error')[1]
        assert browser.find_element('id', 'input').get_attribute('value') == 'more'


def test_the_page_asks_for_the_key(browser, trained, tmp_path):
    with serving(tmp_path, trained, api_key='opensesame') as server:
        browser.get(server.url)
        wait_until(lambda: texts(browser, 'error'))
        assert 'API key' in texts(browser, 'error')[0]
        browser.find_element('css selector', 'summary').click()
        browser.find_element('id', 'key').send_keys('opensesame')
        say(browser, 'def')
        answered(browser)
        assert len(texts(browser, 'assistant')) == 1


def test_the_page_on_chats_leads_from_questions_to_a_browser(
        browser, after_readme, tmp_path, monkeypatch):  # noqa: F811
    folder = tmp_path / 'plaingpt'
    shutil.copytree(after_readme[0], folder, symlinks=True)
    assert not follow('docs/chat.md', folder, monkeypatch, slow=True)
    with serving(tmp_path, folder / 'out-chat', checkpoint='best') as server:
        loaded(browser, server)
        right = []
        for a, b in product((2, 5, 7), (3, 4, 8)):
            browser.find_element('id', 'clear').click()
            say(browser, f'How much is {a} plus {b}?')
            answered(browser)
            found, = texts(browser, 'assistant')
            right.append(found == f'It is {a + b}.')
    assert sum(right) >= 8, right
