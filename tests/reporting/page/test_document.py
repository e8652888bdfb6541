"""The page as one HTML document."""

from exgrpo_jax.reporting.page import contents


def test_the_document_takes_nothing_of_its_data_for_its_own_words():
  parts = {'page': {'title': '{{script}}</title><b>', 'runs': []}, 'visits-0': None}
  text = contents.render(parts)
  assert '<title>{{script}}&lt;/title&gt;&lt;b&gt;</title>' in text
  assert text.count('id="part-') == 1  # None is no part
  assert contents.pack({'text': '\udc80'})  # a lone surrogate can be written
