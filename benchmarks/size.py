"""Print the size of the library: code lines, files, names, imports and function lengths.

A code line is a line of `src/` that holds something other than a comment or a docstring.

    python benchmarks/size.py
    python benchmarks/size.py --by-package
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "retrodict"
SHARED_LINES = 12
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of strings that are statements: docstrings of modules, classes and names."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_lines(text: str) -> list[int]:
    """Return the numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return sorted(lines - docstring_lines(ast.parse(text)))


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number of code lines and the name of each function, without nested ones."""
    text = path.read_text(encoding="utf-8")
    counted = code_lines(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = sum(node.lineno <= line <= (node.end_lineno or 0) for line in counted)
            yield length, f"{path.relative_to(SOURCE)}:{node.name}"


def deep_imports(path: Path) -> int:
    """Count the imports from inside another package."""
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    modules = [
        node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    places = [module.split(".") for module in modules if module.startswith("retrodict.")]
    return sum(len(place) > 2 and place[1] != package for place in places)


def repeated_blocks(paths: list[Path]) -> list[str]:
    """Return where `SHARED_LINES` successive code lines (imports aside) are written again."""
    first_places: dict[str, str] = {}
    places: list[str] = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        imports = {
            line
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        numbers = [line for line in code_lines(text) if line not in imports]
        lines = text.splitlines()
        last = 0
        for i in range(len(numbers) - SHARED_LINES + 1):
            block = "\n".join(lines[n - 1].strip() for n in numbers[i : i + SHARED_LINES])
            here = f"{path.relative_to(SOURCE)}:{numbers[i]}"
            first = first_places.setdefault(block, here)
            if first != here and numbers[i] > last:
                places.append(f"{here} repeats {first}")
                last = numbers[i + SHARED_LINES - 1]
    return places


def exported_names() -> int:
    """Count the names that `import retrodict` offers."""
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return sum(len(node.names) for node in block.body if isinstance(node, ast.ImportFrom))


def namespace_names() -> int:
    """Count the names in the `__all__` of the namespaces."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.glob("*/__init__.py")]
    return sum(
        len(ast.literal_eval(node.value))
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )


def fit_parameters() -> int:
    """Count the parameters of `fit`."""
    tree = ast.parse((SOURCE / "_learning" / "fit.py").read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "fit")
    return len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Print the size of the library.")
    parser.add_argument("--by-package", action="store_true", help="code lines of each entry")
    options = parser.parse_args()
    paths = sorted(SOURCE.rglob("*.py"))
    by_entry: Counter[str] = Counter()
    for path in paths:
        entry = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        by_entry[entry] += len(code_lines(path.read_text(encoding="utf-8")))
    if options.by_package:
        for entry, count in by_entry.most_common():
            print(f"{count:6d}  {entry}")
    longest = sorted((pair for path in paths for pair in functions(path)), reverse=True)
    blocks = repeated_blocks(paths)
    rows = {
        "code lines": by_entry.total(),
        "files": len(paths),
        "top-level entries": len([p for p in SOURCE.iterdir() if p.name != "__pycache__"]),
        "names on `rd.`": exported_names(),
        "names in namespaces": namespace_names(),
        "imports from inside another package": sum(map(deep_imports, paths)),
        "functions over 80 code lines": sum(length > 80 for length, _ in longest),
        "longest function": f"{longest[0][0]} ({longest[0][1]})",
        "parameters of `fit`": fit_parameters(),
        f"blocks of {SHARED_LINES} lines written twice": len(blocks),
    }
    for name, value in rows.items():
        print(f"{name:40s} {value}")
    for place in blocks:
        print(f"  {place}")


if __name__ == "__main__":
    main()
