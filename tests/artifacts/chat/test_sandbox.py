"""Chat templates are untrusted programs: they stay in the sandbox and within the limits."""

import time
from datetime import datetime

import pytest

from jaxformer.artifacts.chat import limits
from jaxformer.artifacts.chat.sandbox import render
from tests.errors import error_of

LONG = "a" * 100_000
# {template: words of the error that it must raise}.
UNSAFE = {
    "{{ ().__class__.__bases__[0].__subclasses__() }}": "unsafe",
    "{{ cycler.__init__.__globals__.os.system('id') }}": "unsafe",
    "{{ self.__init__.__globals__ }}": "unsafe",
    "{{ (x | attr('__class__')).__mro__ }}": "",
    "{{ '{:{}}'.format(x, x) }}": "field",
    "{% include '/etc/passwd' %}": "loader",
    "{% import 'os' as os %}": "loader",
    "{% extends 'base' %}": "loader",
    "{{ messages.append(1) }}": "unsafe",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}": "",
    "{% set ns = namespace(_x=1) %}": "underscore",
    "{{ lipsum() }}": "undefined",
    "{{ open('f') }}": "undefined",
}
UNBOUNDED = {
    "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}": "steps",
    "{% set r = range(99999) %}{% set t = [r, r, r, r, r, r, r, r, r, r, r] %}"
    "{% for a in t %}{% for b in a %}{% endfor %}{% endfor %}": "steps",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    "": "steps",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "deep",
    "{{ range(10**9) }}": "",
    "{% set ns = namespace(s='ab') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}": "characters",
    "{% set ns = namespace(s='ab') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}": "characters",
    "{% set ns = namespace(s='ab') %}{% for a in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}"
    "{% endset %}{% endfor %}": "characters",
    "{% set ns = namespace(s=['ab']) %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}": "characters",
    "{{ 'a' * 10**10 }}": "characters",
    "{{ [0] * 10**10 }}": "characters",
    "{{ 10**10 * 'a' }}": "characters",
    "{{ 2**(2**30) }}": "integers",
    "{{ 'a' | center(10**9) }}": "100,000",
    "{{ 'a'.ljust(10**9) }}": "100,000",
    "{{ '%99999999d' % 3 }}": "field",
    "{{ '%*d' % (10**9, 3) }}": "field",
    "{{ '{:99999999d}'.format(3) }}": "field",
    "{{ '%99999999d' | format(3) }}": "field",
    "{{ long.replace('a', long) }}": "characters",
    "{{ long | replace('a', long) }}": "characters",
    "{{ long.join(long) }}": "characters",
    "{{ ([long] * 1000) | join }}": "characters",
    "{{ (long | replace('a', '\n')) | indent(90000, true, true) }}": "characters",
    "{% for i in range(90000) %}{{ long }}{% endfor %}": "characters",
    "{% set x %}{% for i in range(90000) %}{{ long }}{% endfor %}{% endset %}": "characters",
    "{% for i in range(90000) %}" + LONG + "{% endfor %}": "characters",
}
MALFORMED = {
    "{{ {": "end of template",
    "{% if a is foo %}{% endif %}": "foo",
    "{{ x | foo }}": "foo",
    "{{ a.b.c }}": "undefined",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ 'a' + 1 }}": "TypeError",
    "{{ raise_exception('no\ntools') }}": "no tools",
    "{% generation %}": "end of template",
}


@pytest.mark.parametrize("source", UNSAFE | UNBOUNDED | MALFORMED)
def test_template_that_fails_or_exceeds_a_limit_raises_a_one_line_error(source, monkeypatch):
    monkeypatch.setattr(limits, "MOST_STEPS", 100_000)
    reason = (UNSAFE | UNBOUNDED | MALFORMED)[source]
    start = time.monotonic()
    message = error_of(render, source, {"x": 1, "messages": [], "long": LONG})
    assert message.startswith("the chat template failed: ") and reason in message
    # The limit of the step count is reached in a few seconds, long before the limit in seconds.
    assert time.monotonic() - start < limits.MOST_SECONDS


def test_template_that_needs_too_many_seconds_is_stopped(monkeypatch):
    monkeypatch.setattr(limits, "MOST_SECONDS", 0.0)
    assert "seconds" in error_of(render, "{% for i in [1, 2] %}{{ i }}{% endfor %}", {})


@pytest.mark.parametrize("limit", ["MOST_STEPS", "MOST_CHARACTERS"])
def test_template_loops_and_output_count_towards_the_limits(limit, monkeypatch):
    monkeypatch.setattr(limits, limit, 50)
    source = "{% for i in items %}{{ i }}{% endfor %}"
    assert render(source, {"items": ["a"] * 40}) == "a" * 40
    message = error_of(render, source, {"items": ["a"] * 60})
    assert ("steps" if limit == "MOST_STEPS" else "characters") in message


def test_internal_python_attributes_are_empty_in_templates():
    assert render("{{ x.__class__ }}{{ '{0.__class__}'.format(x) }}", {"x": 1}) == ""


def test_sandbox_limits_do_not_change_results_of_ordinary_template_expressions():
    source = (
        "{% for x in items %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{% endfor %} {{ a ~ 1 ~ none }} {{ '-'.join(items) }} {{ items | join('+') }} "
        "{{ '%03d' % 7 }} {{ '{:>4}'.format('x') }} {{ 2 ** 10 }} {{ 'ab' * 2 }} {{ [1] + [2] }} "
        "{{ 'a\nb' | indent(2) }} {{ items | map('upper') | list }} {{ dict(a=1) }}"
        "{% for x in tree recursive %}({{ x.n }}{{ loop(x.c) }}){% endfor %}"
    )
    tree = [{"n": 1, "c": [{"n": 2, "c": []}]}]
    text = render(source, {"items": ["p", "q"], "a": "é", "tree": tree})
    assert text == (
        "1/2,2/2 é1None p-q p+q 007    x 1024 abab [1, 2] a\n  b ['P', 'Q'] {'a': 1}(1(2))"
    )


def test_json_filter_of_templates_keeps_key_order_and_does_not_escape_html():
    value = {"b": "<é> & 'x'", "a": [1, None, True]}
    assert render("{{ v | tojson }}", {"v": value}) == (
        '{"b": "<é> & \'x\'", "a": [1, null, true]}'
    )
    assert render("{{ v | tojson(indent=1, sort_keys=true) }}", {"v": {"b": 1, "a": 2}}) == (
        '{\n "a": 2,\n "b": 1\n}'
    )


def test_template_statements_write_no_blank_lines_and_support_break():
    source = (
        "{% for x in [1, 2, 3] %}\n  {% if x == 2 %}\n{% break %}{% endif %}\n{{ x }}\n{% endfor %}"
    )
    assert render(source, {}) == "1\n"
    assert render("{{ strftime_now('%Y') }}", {}) == str(datetime.now().year)


def test_start_and_end_marks_in_rendered_templates_surround_only_generation_blocks():
    source = "a{% generation %}b{{ x }}{% endgeneration %}c{% generation %}{% endgeneration %}"
    assert render(source, {"x": 1}) == "ab1c"
    assert render(source, {"x": 1}, ("[", "]")) == "a[b1]c[]"
