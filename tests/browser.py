"""A page in headless Chromium, driven by the DevTools protocol through a pipe."""

import json
import os
import shutil
import subprocess

import pytest

needs_chromium = pytest.mark.skipif(not shutil.which('chromium'), reason='chromium is missing')
PROBLEMS = 'Runtime.consoleAPICalled', 'Runtime.exceptionThrown', 'Log.entryAdded'
KEYS = {'ArrowLeft': 37, 'ArrowRight': 39}  # Windows' numbers, which the protocol asks for


class Page:
    """A context with the page of a file in a window of width × height pixels.

    problems: what is on its console, and the errors that it raised
    """

    def __init__(self, path, profile, width=1200, height=900):
        commands, self.commands = os.pipe()
        answers, theirs = os.pipe()
        self.process = subprocess.Popen(  # it reads from 3 and writes to 4
            ['bash', '-c', f'exec "$@" 3<&{commands} 4>&{theirs}', 'bash', 'chromium', '--headless',
             '--no-sandbox', '--disable-gpu', '--remote-debugging-pipe',
             f'--user-data-dir={profile}', f'--window-size={width},{height}'],
            pass_fds=(commands, theirs), stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(theirs)
        self.answers = open(answers, 'rb')
        self.problems, self.count, self.session = [], 0, {}
        target = self.call('Target.createTarget', url='about:blank')
        self.session = self.call('Target.attachToTarget', flatten=True, **target)
        self.call('Runtime.enable')
        self.call('Log.enable')
        self.call('Page.navigate', url=path.as_uri())
        self.value('new Promise(done => document.readyState === "complete" ? done() : '
                   'addEventListener("load", () => done()))')

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.answers.close()
        os.close(self.commands)

    def message(self):
        text = b''
        while not text.endswith(b'\0'):
            byte = self.answers.read(1)
            assert byte, 'chromium has ended'
            text += byte
        return json.loads(text[:-1])

    def call(self, method, **params):
        """Call a method of the protocol → its result"""
        self.count += 1
        message = {'id': self.count, 'method': method, 'params': params, **self.session}
        os.write(self.commands, json.dumps(message).encode() + b'\0')
        while (answer := self.message()).get('id') != self.count:
            if answer['method'] in PROBLEMS:
                self.problems.append(answer['params'])
        assert 'result' in answer, answer
        return answer['result']

    def value(self, expression):
        """The value of an expression of JavaScript on the page."""
        result = self.call('Runtime.evaluate', expression=expression, returnByValue=True,
                           awaitPromise=True)
        assert 'exceptionDetails' not in result, result
        return result['result'].get('value')

    def point_at(self, selector, clicks=False):
        """Move the mouse to the middle of an element, scrolled into view, and perhaps click."""
        x, y = self.value(f'''(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: 'center'}});
            const {{x, y, width, height}} = element.getBoundingClientRect();
            return [x + width / 2, y + height / 2];
        }})()''')
        for kind in ['mouseMoved', *(['mousePressed', 'mouseReleased'] if clicks else [])]:
            self.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left', clickCount=1)

    def press(self, key):
        for kind in ('rawKeyDown', 'keyUp'):
            self.call('Input.dispatchKeyEvent', type=kind, key=key, code=key,
                      windowsVirtualKeyCode=KEYS[key])
