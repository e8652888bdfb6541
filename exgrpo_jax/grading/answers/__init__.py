"""What an answer says, read from LaTeX or plain text, and whether two say the same.

extraction   a response to its answer, as written
tokens       an answer's text to tokens        units     what stands behind numbers
cursor       a place among tokens              atoms     the smallest expressions
latex        tokens to an expression tree      number, quantity   trees to values
answer       a tree to what it is meant to be  equality  two answers, the same or not
"""
