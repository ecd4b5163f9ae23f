"""Curves as pictures."""

from matplotlib.figure import Figure

from plaingpt.monitoring import figures


def test_what_differs_late_fills_the_picture_and_not_the_steep_start():
    rows = [{'iter': i, 'tokens': i, 'elapsed_s': float(i), 'loss': 10.0 if i < 2 else 3 - i / 100,
             'val_loss': None} for i in range(100)]
    axes = Figure().add_subplot()
    figures.PANELS[0].draw(axes, [('out', rows, 'black')], None)
    low, high = axes.get_ylim()
    assert 1.9 < low < 2.01 < 2.95 < high < 3.1


def test_a_panel_says_what_a_changed_model_does_not_show():
    rows = [{'iter': 1, 'health/grad_norm/h.0': 0.5}]
    texts = {}
    for panel in figures.PANELS:
        axes = Figure().add_subplot()
        if panel.has(rows):
            panel.draw(axes, [('out', rows, 'black')], None)
            texts[panel.title] = [text.get_text() for text in axes.texts]
    assert texts['gradient norm of a layer'] == []
    assert texts['largest attention logit'] == ['not seen in this model']
