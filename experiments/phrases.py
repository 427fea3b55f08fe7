"""Dates, times, amounts and measures in English and French, as the Unicode CLDR writes them.

Babel writes both sides of a pair from one value. Single phrases are divided into training and
held-out phrases *before* they are joined, so no held-out phrase occurs in the training text.
"""

import random
from datetime import date, datetime, timedelta

from babel import Locale
from babel.dates import format_date, format_datetime, format_timedelta
from babel.lists import format_list
from babel.numbers import format_currency, format_decimal, format_percent
from babel.units import format_unit

LOCALES = Locale("en"), Locale("fr")
CURRENCIES = ("EUR", "USD", "GBP", "CHF", "CAD", "JPY")
UNITS = ("length-kilometer", "mass-kilogram", "volume-liter", "temperature-celsius")
# A text has at most this many phrases.
LONGEST = 4


def _both(write) -> tuple[str, str]:
    return tuple(write(locale) for locale in LOCALES)


def _day(random):
    return date(1900, 1, 1) + timedelta(days=random.randrange(200 * 365))


def _date(random):
    day, form = _day(random), random.choice(("full", "long", "medium"))
    return _both(lambda locale: format_date(day, form, locale=locale))


def _moment(random):
    day = _day(random)
    moment = datetime(day.year, day.month, day.day, random.randrange(24), random.randrange(60))
    return _both(lambda locale: format_datetime(moment, "d MMMM y, HH:mm", locale=locale))


def _amount(random, digits):
    return round(10 ** random.uniform(0, digits), 2)


def _number(random):
    number = _amount(random, 7) * random.choice((1, 1, -1))
    return _both(lambda locale: format_decimal(number, locale=locale))


def _percent(random):
    share = random.randrange(1, 1000) / 1000
    return _both(lambda locale: format_percent(share, locale=locale, decimal_quantization=False))


def _money(random):
    amount, currency = _amount(random, 6), random.choice(CURRENCIES)
    form = random.choice(("standard", "name"))
    return _both(lambda locale: format_currency(amount, currency, locale=locale, format_type=form))


def _measure(random):
    amount, unit = int(10 ** random.uniform(0, 4)), random.choice(UNITS)
    return _both(lambda locale: format_unit(amount, unit, locale=locale))


def _span(random):
    span = timedelta(hours=int(10 ** random.uniform(0, 5))) * random.choice((1, -1))
    return _both(lambda locale: format_timedelta(span, locale=locale, add_direction=True))


KINDS = (_date, _moment, _number, _percent, _money, _measure, _span)


def phrases(number: int, seed: int) -> tuple[list, list]:
    """Returns distinct (training, held-out) phrases by kind, with one in ten held out."""
    generator, train, held_out = random.Random(seed), [], []
    for kind in KINDS:
        found = dict(kind(generator) for _ in range(number // len(KINDS)))
        pairs = list(found.items())
        generator.shuffle(pairs)
        cut = -(-len(pairs) // 10)
        train.append(pairs[cut:])
        held_out.append(pairs[:cut])
    return train, held_out


def strung(kinds, number: int, seed: int, *, mostly_short: bool) -> list[tuple[str, str, int]]:
    """Returns `number` texts as (English, French, number of phrases).

    Each text is a list of 1 to LONGEST phrases, and all kinds of phrases are equally frequent.

    Args:
        kinds: a list of phrases for each kind (dates, amounts, …), from `phrases`.
        number: The number of texts.
        seed: The random seed.
        mostly_short: Whether short lists are more frequent than long lists. Short texts make it
            easier to learn which words correspond. If False, all lengths are equally frequent.
    """
    generator, texts = random.Random(seed), []
    counts = range(1, LONGEST + 1)
    often = [LONGEST + 1 - count if mostly_short else 1 for count in counts]
    for count in generator.choices(counts, often, k=number):
        chosen = [generator.choice(generator.choice(kinds)) for _ in range(count)]
        sides = zip(*chosen, strict=True)
        written = [format_list(side, locale=at) for side, at in zip(sides, LOCALES, strict=True)]
        texts.append((*written, count))
    return texts
