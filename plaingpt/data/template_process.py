"""Conversations as a chat template of others writes them, in a process with limits of its own: a
template can loop for days, or ask for all memory, in a few characters.

Standard input: {"template": Jinja, "names": {"bos_token": …}, "conversations": [messages, …]};
standard output: a list of texts, two of each conversation. Any failure ends it with another status.
"""

import json
import sys
from contextlib import suppress

MAX_SECONDS, MAX_MEMORY, MAX_TEXT = 5, 2**30, 2**20  # of a core; bytes; characters of all texts


def main():
    limit()
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # torch brings it
    given = json.load(sys.stdin)

    def fail(message):
        raise ValueError(message)

    # As transformers compiles it: in a sandbox, so a template reaches nothing of this process.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals['raise_exception'] = fail
    compiled = environment.from_string(given['template'])
    texts = [compiled.render(messages=messages, tools=None, documents=None,
                             add_generation_prompt=prompting, **given['names'])
             for messages in given['conversations'] for prompting in (False, True)]
    if sum(map(len, texts)) > MAX_TEXT:
        fail('it writes too much')
    print(json.dumps(texts))


def limit():
    try:
        import resource
    except ImportError:  # Windows, where who waits for this process ends it
        return
    for what, most in ((resource.RLIMIT_CPU, MAX_SECONDS), (resource.RLIMIT_AS, MAX_MEMORY)):
        with suppress(ValueError, OSError):  # there is a lower one, or none of the kind
            resource.setrlimit(what, (most, most))


if __name__ == '__main__':
    main()
