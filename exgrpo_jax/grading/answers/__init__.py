"""Parser for answers in LaTeX or plain text, and comparison of their meanings.

From text to verdict:

  extraction   extracts a response's answer, as written
  tokens       normalizes the spelling and splits the text into tokens
  latex        parses tokens into an expression tree, using the rules in grammar
  operators    turns a tree's derivatives and differentials into calls
  answer       interprets a tree as a reading; solves inequalities and computes matrices
  equality     compares two answers as written and, if they differ, by their readings

These modules build on others: `tree` defines trees and readings, `number` and `quantity` evaluate
and compare trees, and `units` defines units of measurement. `operators` also handles products whose
order matters. `description` describes a reading in words. `sets` compares sets, and `identity` uses
sympy's polynomials to compare expressions for which evaluation is inconclusive. sympy only receives
trees; text from a model is never evaluated as code.
"""
