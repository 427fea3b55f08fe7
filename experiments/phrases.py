"""Dates, times, amounts and measures, in English and in French, as the Unicode CLDR writes them.

Babel makes both sides of each pair from one value. Single phrases are split into those for training
and those held out *before* any are strung together, so nothing held out was ever seen.
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
LONGEST = 6  # phrases strung together


def phrase(random: random.Random) -> tuple[str, str]:
    """One phrase, of a kind drawn at random."""
    kind = random.choice(KINDS)
    return kind(random)


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
    amount, unit = random.randrange(1, 10_000), random.choice(UNITS)
    return _both(lambda locale: format_unit(amount, unit, locale=locale))


def _span(random):
    span = timedelta(hours=int(10 ** random.uniform(0, 5))) * random.choice((1, -1))
    return _both(lambda locale: format_timedelta(span, locale=locale, add_direction=True))


KINDS = (_date, _date, _moment, _number, _percent, _money, _money, _measure, _span)


def phrases(number: int, seed: int) -> tuple[list, list]:
    """(for training, held out): distinct single phrases, one in ten of them held out."""
    generator, found = random.Random(seed), {}
    for _ in range(number):
        english, french = phrase(generator)
        found.setdefault(english, french)
    pairs = list(found.items())
    generator.shuffle(pairs)
    cut = len(pairs) // 10
    return pairs[cut:], pairs[:cut]


def strung(pairs, number: int, seed: int) -> list[tuple[str, str, int]]:
    """(English, French, how many phrases): lists of 1 … LONGEST phrases of those given."""
    generator, texts = random.Random(seed), []
    for _ in range(number):
        count = generator.randint(1, LONGEST)
        chosen = [generator.choice(pairs) for _ in range(count)]
        sides = zip(*chosen, strict=True)
        written = [format_list(side, locale=at) for side, at in zip(sides, LOCALES, strict=True)]
        texts.append((*written, count))
    return texts
