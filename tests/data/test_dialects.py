"""Tables are read whatever their separator, quotes and encoding, and what was recognized is said."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.files import describe_file
from sansgpu.data.forms.files import file_notes
from sansgpu.data.rows import SourceRow
from sansgpu.data.sources import Source, open_sources
from sansgpu.data.tables import Columns


def opened(path: Path, **settings: Any) -> Source:
    return open_sources(DataConfig.model_validate({"dataset_name": str(path), **settings})).train


def rows(path: Path, content: str | bytes, written_as: str = "utf-8", **settings: Any) -> list[Any]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode(written_as))
    return [
        tuple(row.value.values()) if row.problem is None else row.problem for row in opened(path, **settings).rows()
    ]


REVIEWS = [("Gute Küche, nette Leute", "gut"), ("Nie wieder | niemals", "schlecht"), ("Sehr gut", "gut")]


@pytest.mark.parametrize("separator", [",", ";", "|", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_table_is_read_with_every_separator_and_encoding(tmp_path: Path, separator: str, encoding: str) -> None:
    quoted = [
        f'"{text}"{separator}{label}' if separator in text else f"{text}{separator}{label}" for text, label in REVIEWS
    ]
    content = f"text{separator}label\r\n" + "\r\n".join(quoted) + "\r\n"
    assert rows(tmp_path / "a.csv", content, encoding) == REVIEWS
    said = describe_file(tmp_path / "a.csv")
    words = {",": "commas", ";": "semicolons", "|": "bars", "\t": "tabs"}[separator]
    if separator == "," and encoding.startswith("utf-8"):
        assert said is None
    else:
        assert said is not None
        assert said.startswith(f"2 columns separated by {words} (text, label)")
        assert ("cp1252" in said, "utf-16" in said) == (encoding == "cp1252", encoding.startswith("utf-16"))


@pytest.mark.parametrize(
    ("header", "lines", "expected"),
    [
        ("text;score", ["Gut, sehr gut;3,5", "Na ja;1,25"], [("Gut, sehr gut", "3,5"), ("Na ja", "1,25")]),
        ("Name, Vorname;Alter", ["Müller, Hans;30", "Ott, Eva;41"], [("Müller, Hans", "30"), ("Ott, Eva", "41")]),
        ("text,label", ["a;b,pos", "c;d,neg"], [("a;b", "pos"), ("c;d", "neg")]),
        ("question,choices", ["a?,x|y|z", "b?,y|z"], [("a?", "x|y|z"), ("b?", "y|z")]),
        ('"text";"label"', ['"so; la";"pos"', '"x ""y"" z";"neg"'], [("so; la", "pos"), ('x "y" z', "neg")]),
        ("text", ["one; two", "three", "four; five; six"], [("one; two",), ("three",), ("four; five; six",)]),
        ("id|text|label", ["1|so, la|pos", "2|na; ja|neg"], [("1", "so, la", "pos"), ("2", "na; ja", "neg")]),
        ("sep=;\ntext;label", ["a,b;pos"], [("a,b", "pos")]),
    ],
)
def test_the_separator_is_the_one_with_the_same_number_of_columns(
    tmp_path: Path, header: str, lines: list[str], expected: list[tuple[str, ...]]
) -> None:
    assert rows(tmp_path / "a.csv", "\n".join([header, *lines]) + "\n") == expected


def test_separator_and_encoding_can_be_set(tmp_path: Path) -> None:
    path, content = tmp_path / "a.csv", "text~label\nfür~pos\n".encode("cp1252")
    assert rows(path, content, separator="~", encoding="cp1252") == [("für", "pos")]
    assert rows(path, content, separator="~", encoding="cp437")[0][0] != "für"
    prints = {
        opened(path, **{"separator": s, "encoding": e}).fingerprint for s in ("~", "auto") for e in ("cp1252", "auto")
    }
    assert len(prints) == 4
    assert rows(path, "text\tlabel\na\tb\n", separator="\\t") == [("a", "b")]
    with pytest.raises(ValueError, match="auto or one character"):
        DataConfig.model_validate({"separator": ";;"})
    with pytest.raises(ValueError, match="an encoding that Python knows"):
        DataConfig.model_validate({"encoding": "latin-99"})


ENCODED = {
    "cp1252": [
        "Le café était très bon, déjà vu",
        "El niño comió mañana",
        "It’s “great” – really…",
        "100 £ extra",
        "über",
    ],
    "cp1250": ["Zażółć gęślą jaźń, bardzo słabe", "Příliš žluťoučký kůň, velmi dobré jídlo"],
    "cp1254": ["Yemekler soğuktu ve geç geldi, ışık yok"],
    "cp1251": ["Очень вкусно, рекомендую", "супер", "плохо"],
    "koi8_r": ["Очень вкусно, рекомендую", "Больше не придём"],
    "cp1253": ["Πολύ καλό φαγητό", "Δεν θα ξαναπάμε"],
    "cp1255": ["אוכל טעים מאוד", "לא נחזור"],
    "cp1256": ["الطعام لذيذ جدا", "لن نعود"],
    "cp932": ["とても美味しい", "もう行かない"],
    "gb18030": ["非常好吃", "再也不去了", "服务态度很好，环境也不错"],
    "big5": ["服務態度很好，環境也不錯", "再也不去了"],
    "cp949": ["정말 맛있어요", "다시는 안 가요"],
    "mac_roman": ["Das Essen war für uns schön", "Le café était très bon"],
}


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt", "a.conll"])
def test_encodings_of_short_texts_are_recognized(tmp_path: Path, encoding: str, name: str) -> None:
    for text in ["\n".join(ENCODED[encoding]), *ENCODED[encoding][:1]]:
        lines = {
            "a.csv": ["text;label", *(f"{line};pos" for line in text.split("\n"))],
            "a.jsonl": [f'{{"text": "{line}"}}' for line in text.split("\n")],
            "a.txt": text.split("\n"),
            "a.conll": [f"{word} O" for word in text.split()],
        }[name]
        (tmp_path / name).write_bytes("\n".join(lines).encode(encoding))
        column = "text" if name == "a.csv" else None
        read = "".join(piece.text for piece in opened(tmp_path / name, text_column=column).read())
        assert read == (
            " ".join(text.split()) if name == "a.conll" else text if name == "a.txt" else text.replace("\n", "")
        )


# Sentences of reviews, and the encodings in which files of their language come.
LANGUAGES = {
    "Wczoraj poszliśmy nad rzekę. Obsługa była miła, na zupę czekaliśmy godzinę. Źle oceniam hałas. Żona jadła gęś.":
        ["cp1250", "iso8859-2"],
    "Včera jsme šli do restaurace. Obsluha milá, ale polévku přinesli pozdě. Těšíme se příště, žádné další připomínky.":
        ["cp1250", "iso8859-2"],
    "Včera sme išli k rieke. Obsluha veľmi milá, ceny príliš vysoké. Ľutujem, že dážď pršal. Ťažký stôl, vŕba, vĺča.":
        ["cp1250", "iso8859-2"],
    "Jučer smo išli u šetnju. Žena je naručila čaj, a đumbir je bio odličan. Možda ćemo doći opet.":
        ["cp1250", "iso8859-2"],
    "Tegnap az étterembe mentünk. A leves finom volt, de fűszeresebb ételt vártunk. Őszintén: az árak túl magasak.":
        ["cp1250", "iso8859-2"],
    "Eşim mantı sipariş etti. Çocuklar oyun alanına bayıldı, ışıklar güzeldi. İçecekler soğuktu, Şef güler yüzlü.":
        ["cp1254", "iso8859-9"],
    "Вчера мы ходили в ресторан. Жена заказала вареники с капустой. Плохо оцениваю шум: гости пели. Чай щедрый.":
        ["cp1251", "koi8-r", "iso8859-5", "cp866"],
    "Учора ми ходили до ресторану. Їжа була смачною, проте ціни надто високі. Є ще ґанок із квітами.":
        ["cp1251", "koi8-u"],
    "Ma sœur a commandé des œufs à la crème. C'était très agréable, mais ça coûte 25 €. Les hôtes étaient bruyants.":
        ["cp1252", "iso8859-15"],
    "Χθες πήγαμε στο εστιατόριο. Η σούπα άργησε πολύ. Άσχημα αξιολογώ τον θόρυβο. Όλα τα παιδιά χάρηκαν.":
        ["cp1253", "iso8859-7"],
    "昨日、川のそばのレストランへ行きました。サービスは親切でしたが、スープを一時間待ちました。次回は静かな時間を選びます。":
        ["shift_jis", "euc_jp"],
    "昨天我们去了河边的餐馆。服务非常周到，但是等汤等了一个多小时。饭菜很好吃，不过价格太高。": ["gb18030", "gbk"],
    "昨天我們去了河邊的餐館。服務非常周到，但是等湯等了一個多小時。飯菜很好吃，不過價格太高。": ["big5"],
    "어제 강가에 있는 식당에 갔습니다. 서비스는 친절했지만 수프를 오래 기다렸습니다. 음식은 맛있었습니다.": ["euc_kr"],
    "เมื่อวานเราไปร้านอาหารริมแม่น้ำ บริการดีมาก แต่รอซุปนานกว่าหนึ่งชั่วโมง อาหารอร่อยแต่ราคาแพงเกินไป": ["cp874"],
    "Vakar ėjome į restoraną. Žmona užsisakė virtinukų, o aš keptą žąsį. Galbūt kitą kartą rinksimės ramesnį laiką.":
        ["cp1257"],
}  # fmt: skip
# The largest texts of the first encoding of each language are tried often.
SIZED = [
    pytest.param(text, one, size, id=f"{one}-{size}", marks=pytest.mark.long if size > 10_000 and place else ())
    for size in (1_000, 10_000, 100_000) for text, ones in LANGUAGES.items() for place, one in enumerate(ones)
]  # fmt: skip


@pytest.mark.parametrize(("text", "encoding", "size"), SIZED)
def test_encodings_of_longer_texts_are_recognized(tmp_path: Path, text: str, encoding: str, size: int) -> None:
    sentences, draw = re.findall(r".+?(?:[.。] ?|$)", text), random.Random(size)
    content = "\n".join("".join(draw.choices(sentences, k=draw.randint(1, 4))) for _ in range(2 * size // len(text)))
    (path := tmp_path / "a.txt").write_bytes(content.encode(encoding))
    assert "".join(piece.text for piece in opened(path).read()) == content
    assert describe_file(path)


def test_the_note_names_the_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("Možda ćemo doći šetnjom, žena naručuje čaj.\n".encode("iso8859-2"))
    said = f"{path}: read as text in the encoding iso8859-2; data.encoding changes this."
    assert file_notes(DataConfig(dataset_name=str(path)), "texts") == [said]


def test_a_file_with_a_few_damaged_lines_is_still_utf8(tmp_path: Path) -> None:
    content = "text,label\nnaïve,pos\nfür,neg\n".encode() + b"caf\xe9,pos\nb,neg\n"
    good, other, bad, last = rows(tmp_path / "a.csv", content)
    assert (good, other, last) == (("naïve", "pos"), ("für", "neg"), ("b", "neg"))
    assert bad.startswith(f"{tmp_path}/a.csv, line 4 is not UTF-8 text (byte 0xe9)")
    assert rows(tmp_path / "b.csv", content.replace(b"caf\xe9", b'"x\ny\xe9"'))[2].startswith(
        f"{tmp_path}/b.csv, line 5 is not"
    )


def test_letters_after_the_first_megabytes_are_read(tmp_path: Path) -> None:
    content = b"text,label\n" + b"plain words of ascii,pos\n" * 100_000 + "schöne Grüße,neg\n".encode("cp1252")
    assert rows(tmp_path / "a.csv", content)[-1] == ("schöne Grüße", "neg")


def test_what_the_encoding_lacks_is_a_bad_row(tmp_path: Path) -> None:
    content = b"text;label\nf\xfcr;pos\nun\x81d;neg\nsch\xf6n;pos\n"
    first, bad, last = rows(tmp_path / "a.csv", content, encoding="cp1252")
    assert (first, last) == (("für", "pos"), ("schön", "pos"))
    assert bad.startswith(f"{tmp_path}/a.csv, line 3 is not cp1252 text; fix or remove the row, or set data.encoding")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (",text,label\n0,a,pos\n1,b,neg\n", [("a", "pos"), ("b", "neg")]),
        ("Unnamed: 0,text,label\n17,a,pos\n3,b,neg\n", [("a", "pos"), ("b", "neg")]),
        ('"","text","label"\n"1","a, b","pos"\n"2","c","neg"\n', [("a, b", "pos"), ("c", "neg")]),  # R's write.csv
        ('"text","label"\n"1","a","pos"\n"2","b","neg"\n', [("a", "pos"), ("b", "neg")]),  # R's write.table
        (";text;label\n0;a;pos\n1;b;neg\n;;\n", [("a", "pos"), ("b", "neg")]),
        (",text,label\nx,a,pos\ny,b,neg\n", [("x", "a", "pos"), ("y", "b", "neg")]),  # no index
        ("id,text\n0,a\n1,b\n", [("0", "a"), ("1", "b")]),
    ],
)
def test_an_index_column_is_left_out(tmp_path: Path, content: str, expected: list[tuple[str, ...]]) -> None:
    assert rows(tmp_path / "a.csv", content) == expected
    assert ("index column left out" in (describe_file(tmp_path / "a.csv") or "")) == (
        len(expected[0]) == 2 and "id" not in content
    )


@pytest.mark.parametrize("empty", [",,\n", '"",,""\n', " , ,\n", "\n", ",,,,,\n"])
def test_empty_rows_are_no_rows(tmp_path: Path, empty: str) -> None:
    content = f"id,text,label\n1,a,pos\n{empty}2,b,neg\n{empty * 3}"
    assert rows(tmp_path / "a.csv", content) == [("1", "a", "pos"), ("2", "b", "neg")]
    assert rows(tmp_path / "b.tsv", content.replace(",", "\t").replace('""', "")) == [
        ("1", "a", "pos"),
        ("2", "b", "neg"),
    ]


@pytest.mark.parametrize("cell", ["nan", "NaN", "NULL", "#N/A", "<NA>", "None", "NA", "N/A", "null", " nan ", ""])
def test_cells_for_missing_values_are_empty(tmp_path: Path, cell: str) -> None:
    content = f"text,label,other\n{cell},pos,x\nb,{cell},y\nc,neg,{cell}\nd,pos,z\n"
    found = rows(tmp_path / "a.csv", content)
    assert [value or None for value in (found[0][0], found[1][1])] == [None, None]
    assert (found[2][2] == cell) == (cell in ("None", "NA", "N/A", "null", ""))  # it may be a name there
    assert found[3] == ("d", "pos", "z")


@pytest.mark.parametrize("word", ["None", "NA", "N/A", "none"])
def test_a_word_that_is_as_frequent_as_the_classes_is_one(tmp_path: Path, word: str) -> None:
    content = "text,mood\n" + "".join(f"text {n},{(word, 'good', 'bad')[n % 3]}\n" for n in range(12))
    found = rows(tmp_path / "a.csv", content, label_column="mood")
    assert [label for _, label in found] == [word, "good", "bad"] * 4
    if word != "none":
        assert f'"{word}" in column mood is a value' in (
            describe_file(tmp_path / "a.csv", Columns(label="mood").format) or ""
        )


def test_spaces_after_the_commas_of_a_header_are_no_part_of_the_names(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows(path, "text, label\na,pos\n")
    assert [row.value for row in opened(path).rows()] == [{"text": "a", "label": "pos"}]
    rows(path, 'text, label, note\n"a, b", "pos", "x, y"\nc, neg, z\n')
    assert [tuple(row.value.values()) for row in opened(path).rows()] == [("a, b", "pos", "x, y"), ("c", "neg", "z")]


def test_lines_in_quotes_keep_their_ends(tmp_path: Path) -> None:
    content = 'text,label\r\n"The 5"" screen\r\nis bright",pos\r\n"a\n\nb",neg\r\n'
    assert rows(tmp_path / "a.csv", content) == [('The 5" screen\r\nis bright', "pos"), ("a\n\nb", "neg")]
    assert rows(tmp_path / "b.csv", content.replace(",", "\t")) == [
        ('The 5" screen\r\nis bright', "pos"),
        ("a\n\nb", "neg"),
    ]
    assert rows(tmp_path / "c.csv", "text,label\ra,pos\rb,neg\r") == [
        ("a", "pos"),
        ("b", "neg"),
    ]  # old Macs


def test_quotes_between_tabs_are_recognized(tmp_path: Path) -> None:
    """pandas writes them around texts with quotes; other programs never do."""
    assert rows(tmp_path / "a.tsv", 'text\tlabel\n"He said ""hi"""\tpos\nb\tneg\n') == [
        ('He said "hi"', "pos"),
        ("b", "neg"),
    ]
    assert rows(tmp_path / "b.tsv", '"text"\t"label"\n"a"\t"pos"\n') == [("a", "pos")]
    assert rows(tmp_path / "c.tsv", 'text\tlabel\n"a" and "b"\tpos\n"c"\tneg\n') == [
        ('"a" and "b"', "pos"),
        ('"c"', "neg"),
    ]


LONE = [
    ('text,label\n"The soup was cold",neg\n"lone,pos\nbad,neg\n"fine, ok",pos\n', 3, [0, 2, 3]),
    ('text,label\na,pos\n"never closed,neg\nb,pos\nc,neg\n', 3, [0, 2, 3]),
    ('text,label\na,pos\n"b"c,neg\nd,pos\n', 3, [0, 2]),
    ('text,label\na,pos\n"two\nlines",neg\n"x,pos\nd,neg\ne,"pos"\n', 5, [0, 1, 3, 4]),
    ('text;label\na;pos\nb;"neg\nc;pos\n', 3, [0, 2]),
]


@pytest.mark.parametrize(("content", "line", "good"), LONE)
def test_a_lone_quote_names_its_line_and_costs_no_other_row(
    tmp_path: Path, content: str, line: int, good: list[int]
) -> None:
    found = rows(tmp_path / "a.csv", content)
    assert [number for number, row in enumerate(found) if not isinstance(row, str)] == good
    (problem,) = (row for row in found if isinstance(row, str))
    assert problem.startswith(f"{tmp_path}/a.csv, line {line} is not valid CSV")


def test_a_row_with_more_fields_than_the_header_is_bad(tmp_path: Path) -> None:
    found = rows(
        tmp_path / "a.csv", 'text,label\n"The soup was cold",neg\nI liked it, really,pos\n"Great",pos\nb,neg,,\n'
    )
    assert found == [
        ("The soup was cold", "neg"),
        f"{tmp_path}/a.csv, line 3 has 3 columns, but the header has 2; put a text that contains a comma in quotes, or "
        "remove the line.",
        ("Great", "pos"),
        ("b", "neg"),
    ]
    (bad,) = rows(tmp_path / "b.tsv", "text\tlabel\na\tb\tc\n")
    assert bad == f"{tmp_path}/b.tsv, line 2 has 3 columns, but the header has 2; fix or remove the line."


def test_a_table_of_one_column_may_have_commas(tmp_path: Path) -> None:
    content = "text\nHello, world\nshort\n"
    bad, good = rows(tmp_path / "a.csv", content)
    assert (good, bad.endswith("set data.separator to a character that no text has.")) == (("short",), True)
    assert rows(tmp_path / "a.csv", content, separator="~") == [("Hello, world",), ("short",)]


def test_a_field_of_many_lines_does_not_hide_the_columns(tmp_path: Path) -> None:
    code = "\n".join(f"line {number}; a, b | c" for number in range(30_000))
    content = f'{"".join(",prompt;text,label")}\n0,"{code}",pos\n1,b,neg\n'
    assert rows(tmp_path / "a.csv", content) == [(code, "pos"), ("b", "neg")]


def test_equal_names_of_columns_lose_no_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows(path, "note,note,,label\na,b,c,pos\n")
    assert [row.value for row in opened(path).rows()] == [{"note 0": "a", "note": "b", "column 2": "c", "label": "pos"}]


@pytest.mark.parametrize("header", ["text,label,text", "label, text,text", "text,label,label"])
def test_equal_names_of_columns_that_are_read_are_refused(tmp_path: Path, header: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.csv: its header has the column \w+ more than once \(columns"):
        rows(tmp_path / "a.csv", f"{header}\na,b,c\n")
    assert len(rows(tmp_path / "a.csv", "note,note,label\na,b,c\n")) == 1
    with pytest.raises(ConfigError, match="the column note more than once"):
        rows(tmp_path / "a.csv", "note,note,label\na,b,c\n", text_column="note")


def test_what_was_recognized_is_said_in_one_line(tmp_path: Path) -> None:
    rows(tmp_path / "a.csv", "text;label\nKüche;gut\n", "cp1252")
    data = DataConfig(dataset_name=str(tmp_path / "a.csv"))
    said = (
        "read as 2 columns separated by semicolons (text, label), encoding cp1252; data.separator and data.encoding "
        "change this."
    )
    assert file_notes(data, "labeled texts") == [f"{tmp_path}/a.csv: {said}"]
    rows(tmp_path / "b.csv", "text;label\nschön;gut\n", "cp1252")
    data = DataConfig(dataset_name=str(tmp_path))
    assert file_notes(data, "labeled texts") == [f"{tmp_path}/a.csv and 1 other file: {said}"]
    rows(tmp_path / "a.csv", "text,label\nKüche,gut\n")
    rows(tmp_path / "b.csv", "\ufefftext,label\nKüche,gut\n")
    assert file_notes(data, "labeled texts") == []


@pytest.mark.parametrize(
    ("name", "title", "header", "row"),
    [
        ("a.csv", "Reviews of May\n", "text,label", "fine,good"),
        ("a.csv", '"Reviews, of May",\n,\n', "Text,Label", "fine,good"),
        ("a.csv", "Bewertungen\n\n", "text;label", "fine;good"),
        ("a.tsv", "Reviews\t\n", "text\tlabel", "fine\tgood"),
        ("a.csv", "sep=;\nReviews of May;\n", "text;label", "fine;good"),
    ],
)
def test_a_title_above_the_header_is_left_out(name: str, title: str, header: str, row: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(f"{title}{header}\n{row}\n" + f"{row}\n")
    found = [*opened(path).rows()]
    assert [{name.lower(): value for name, value in one.value.items()} for one in found] == [
        {"text": "fine", "label": "good"}
    ] * 2
    assert "above the header left out" in str(describe_file(path, Columns().format))
    plain = tmp_path / "plain.csv"
    plain.write_text("text\nReviews of May\nlabel, text\nfine, good\n")
    assert next(opened(plain).rows()).value == {"text": "Reviews of May"}


@pytest.mark.parametrize(("separator", "said"), [(";", "semicolons"), (",", "commas"), ("|", "bars")])
def test_a_file_for_tabs_may_have_other_separators(separator: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    lines = [f"text{separator}label", *(f"film {number}{separator}good" for number in range(4))]
    assert rows(path, "\n".join(lines))[0] == ("film 0", "good")
    assert str(describe_file(path)).startswith(f"2 columns separated by {said}")
    assert rows(path, "a, b\nc, d\ne, f\n") == [("c, d",), ("e, f",)], "commas of a text"


def test_plain_tables_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1\n\n2,"three, four"\n', newline="")
    assert list(opened(path).rows()) == [
        SourceRow(f"{path}, row 1", {"id": "1", "text": None}),
        SourceRow(f"{path}, row 2", {"id": "2", "text": "three, four"}),
    ]
