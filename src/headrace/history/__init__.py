"""What the papers of 2014 to 2020 brought: recurrent encoder-decoders with attention, the Transformer, T5 and BERT,
sparse and tiled attention, S4 and RWKV-4, and the softmax RNN. It stands on the core, which does not import it."""
