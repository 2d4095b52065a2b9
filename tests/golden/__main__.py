"""``python -m tests.golden`` rewrites the texts in this folder and says which changed."""

from tests.golden import texts

for name in {*texts.kept()} - {*texts.names()}:
    (texts.FOLDER / name).unlink()
    print(f"removed  {name}")
for name in texts.names():
    path, now = texts.FOLDER / name, texts.text(name)
    if not path.exists() or path.read_text() != now:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(now)
        print(f"rewritten  {name}")
