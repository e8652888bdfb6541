"""What an answer means, read from LaTeX or plain text, and whether two answers mean the same.

From text to verdict:

  extraction   a response to its answer, as written; boxes are in boxes
  spelling     one spelling for what has several
  tokens       text to tokens
  latex        tokens to an expression tree; its parts are cursor and grammar
  calculus     derivatives and differentials in a tree to calls
  answer       a tree to its reading; its parts are inequality and matrix
  matching     two readings: do they mean the same?
  equality     two answers as written: are they the same?

Below them are tree, which says what trees and readings are, number and quantity, which evaluate
and compare trees, operators, for products whose order matters, and units. description puts a
reading into words. sympy decides, from trees, what numbers cannot: sets, and in identity
expressions. Nothing that a model wrote is evaluated as code.
"""
