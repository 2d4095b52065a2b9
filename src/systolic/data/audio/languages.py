"""Languages of Whisper: the code in the name of a language's token, by the language's name."""

NAMES = """
en english zh chinese de german es spanish ru russian ko korean fr french ja japanese pt portuguese tr turkish
pl polish ca catalan nl dutch ar arabic sv swedish it italian id indonesian hi hindi fi finnish vi vietnamese
he hebrew uk ukrainian el greek ms malay cs czech ro romanian da danish hu hungarian ta tamil no norwegian th
thai ur urdu hr croatian bg bulgarian lt lithuanian la latin mi maori ml malayalam cy welsh sk slovak te
telugu fa persian lv latvian bn bengali sr serbian az azerbaijani sl slovenian kn kannada et estonian mk
macedonian br breton eu basque is icelandic hy armenian ne nepali mn mongolian bs bosnian kk kazakh sq
albanian sw swahili gl galician mr marathi pa punjabi si sinhala km khmer sn shona yo yoruba so somali af
afrikaans oc occitan ka georgian be belarusian tg tajik sd sindhi gu gujarati am amharic yi yiddish lo lao uz
uzbek fo faroese ht haitian_creole ps pashto tk turkmen nn nynorsk mt maltese sa sanskrit lb luxembourgish my
myanmar bo tibetan tl tagalog mg malagasy as assamese tt tatar haw hawaiian ln lingala ha hausa ba bashkir jw
javanese su sundanese yue cantonese my burmese ca valencian nl flemish ht haitian lb letzeburgesch ps pushto
pa panjabi ro moldavian ro moldovan si sinhalese es castilian zh mandarin
"""
"""Codes, each with a name behind it; some have several (openai/whisper, whisper/tokenizer.py: LANGUAGES, TO_LANGUAGE_CODE)."""
_WORDS = NAMES.split()
CODES = {name.replace("_", " "): code for code, name in zip(_WORDS[::2], _WORDS[1::2], strict=True)}
"""Name of a language in lower case to its code."""


def token_of(language: str) -> str:
    """The token of a language: ``<|de|>`` for ``de``, ``<|de|>``, ``german`` and ``German``."""
    given = language.lower()
    if given.startswith("<|"):
        return given
    return f"<|{CODES.get(given, given)}|>"


def language_of(token: str) -> str:
    """The code of a language's token: ``de`` for ``<|de|>``; "" for any other token."""
    code = token.removeprefix("<|").removesuffix("|>")
    return code if token == f"<|{code}|>" and code in CODES.values() else ""


def name_of(code: str) -> str:
    """The first name of a language by its code: ``german``; "" for ""."""
    return next((name for name, one in CODES.items() if one == code), "")
