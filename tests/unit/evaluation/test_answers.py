"""Answers in generated solutions."""

from decimal import Decimal

import pytest

from megatron_fbt.evaluation.answers import last_box, normal_form, number_after_mark, same_answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("#### $1,234.50 in all", "1234.5"),
        ("#### -5", "-5"),
        ("#### -$5", "-5"),
        ("####18", "18"),
        ("#### 18.", "18"),
        ("#### 18.00", "18"),
        ("#### 12 eggs\n\nQuestion: ...\n#### 99", "12"),
        ("#### unknown\n#### 4", "4"),
        ("The answer is 7", None),
        ("### 7", None),
        ("####", None),
    ],
)
def test_number_after_the_mark(text, number):
    found = number_after_mark(text)
    assert (found and found[0]) == (None if number is None else Decimal(number))


def test_where_the_number_ends():
    text = "a\n#### 12 eggs"
    assert text[: number_after_mark(text)[1]] == "a\n#### 12"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so $\boxed{42}$.", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, \{2\}\right\}} done", r"\left\{1, \{2\}\right\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed 5.", "5."),
        (r"\boxed{3} and \boxed{unfinished", "3"),
        (r"\boxed{", None),
        ("42", None),
    ],
)
def test_last_box(text, content):
    found = last_box(text)
    assert (found and found[0]) == content


def test_where_the_box_ends():
    text = r"so $\boxed{\frac{1}{2}}$. Next"
    assert text[: last_box(text)[1]] == r"so $\boxed{\frac{1}{2}}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("42", "42"),
        ("$42$", "42"),
        ("42.", "42"),
        (".5", "0.5"),
        ("0.50", r"\frac{1}{2}"),
        ("1/2", r"\frac12"),
        (r"\dfrac{3}{4}", r"\tfrac34"),
        (r"-\frac{1}{2}", "-1/2"),
        (r"\frac{-1}{2}", "-0.5"),
        ("1,000", "1000"),
        ("1,234,567", r"1{,}234{,}567"),
        (r"\left(3, \frac{\pi}{2}\right)", r"(3,\frac{\pi}{2})"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"50\%", "50"),
        (r"\$18", "18"),
        (r"5\text{ cm}", "5"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\text{(C)}", "(C)"),
        ("x = 5", "5"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"2\sqrt{3}", r"2 \sqrt 3"),
        (r"11\,111", "11111"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)
def test_equal_answers(given, expected):
    assert same_answer(given, expected), (normal_form(given), normal_form(expected))
    assert same_answer(expected, given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("42", "43"),
        ("1/2", "1/3"),
        ("-1", "1"),
        ("", "0"),
        ("(1,2)", "(2,1)"),
        ("1,2", "12"),
        (r"\frac{1}{0}", "0"),
        (r"\text{east}", r"\text{west}"),
        ("x^2", "x^3"),
        (r"\sqrt{2}", "2"),
        ("10,00", "1000"),
    ],
)
def test_different_answers(given, expected):
    assert not same_answer(given, expected)
