"""The questions that figures and tests are about, by what kind of text they ask for."""

PROMPTS = {
    "code": "Write a Python class Stack with push, pop, peek, is_empty and size methods, and show how to use it.",
    "list": "List twenty countries in Europe with their capitals, one per line.",
    "prose": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "json": 'Give a JSON array of six objects, each with the fields "name", "age", "city" and "email".',
    "repeat": "Copy this text three times, word for word: The quick brown fox jumps over the lazy dog near the river.",
    "edit": """Rewrite this function with type hints and a docstring, and keep everything else:

def merge(left, right):
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result
""",
}
