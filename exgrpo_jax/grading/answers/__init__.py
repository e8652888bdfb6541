"""Reading of answers in LaTeX or plain text, and comparison of their meanings.

From text to verdict:

  extraction   from a response to its answer, as written
  tokens       from the text to one spelling, and to tokens
  latex        from tokens to an expression tree; its grammar is in grammar
  operators    from derivatives and differentials in a tree to calls
  answer       from a tree to its reading, with inequalities and matrices
  equality     comparison of two answers, as written and by their readings

They use tree, which defines trees and readings; number and quantity, which evaluate and compare
trees; operators, for products whose order matters; and units. description puts a reading into
words. From trees, sympy decides what numbers cannot: sets, in sets, and expressions, in identity.
Text from a model is never evaluated as code.
"""
